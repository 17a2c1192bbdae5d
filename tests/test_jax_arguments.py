"""Bad arguments of numbsparse.jax are refused by their names."""

import pytest
from arguments_helpers import check_odd

jax = pytest.importorskip("jax", reason="JAX is not installed: see CONTRIBUTING.md")
nsj = pytest.importorskip("numbsparse.jax")

import jax.numpy as jnp  # noqa: E402

X, LAYOUT = jnp.ones((2, 8)), [[1, 0], [1, 1]]
W = nsj.BlockSparse(jnp.ones((3, 4, 4)), LAYOUT)
OF_JAX = [X, X.T, X.astype(int), X.astype(jnp.float16), X.astype(jnp.bfloat16), W, W.T]
CALLS = {  # a call, and arguments that are right
    "BlockSparse": (nsj.BlockSparse, {"values": W.values, "layout": LAYOUT}),
    "from_dense": (nsj.BlockSparse.from_dense, {
        "array": jnp.ones((8, 8)), "layout": LAYOUT, "block_size": 4}),
    "matmul": (nsj.matmul, {"x": X, "w": W}),
    "sddmm": (nsj.sddmm, {"a": X.T, "b": X, "layout": LAYOUT, "block_size": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_taken_or_named(name):
    call, right = CALLS[name]
    check_odd(call, lambda: right, OF_JAX)
