"""Gates that the host knows: kernels read w, and leave its gradient, where the blocks are."""

from importlib import import_module

import numpy as np
import pytest
from gate_helpers import close, spread

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.dtypes import as_dtype

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator"),
]
matmul, sddmm = (import_module(f"numbsparse.ops.{name}") for name in ("matmul", "sddmm"))
KEPT = np.bool_([[1, 1, 1], [1, 0, 1], [0, 1, 1]])
MASK, NUMBERS = (1, 0, 1, 0, 0, 1, 1), (0.5, 0, -1.5, 0, 0, 1, 2)
KERNELS = [
    ("k6_hopper", "float16", 32, 0),
    ("k6_hopper", "bfloat16", 64, 8),
    ("k6_hopper", "float32", 32, 0),
    ("k7_small_blocks", "float16", 8, 0),
    ("k7_small_blocks", "bfloat16", 16, 3),
    ("k7_small_blocks", "float32", 8, 0),
    ("k8_small_batch", "float16", 32, 0),
    ("k8_small_batch", "float16", 8, 3),
]


@pytest.mark.parametrize(("kernel", "dtype", "size", "edge"), KERNELS)
@pytest.mark.parametrize("gates", [MASK, NUMBERS], ids=["mask", "numbers"])
@pytest.mark.parametrize("call", ["x @ w", "x @ w.T"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.pairs
def test_a_step_with_gates_that_are_known(
    kernel, dtype, size, edge, gates, call, trained, rng, monkeypatch
):
    """What is zero is neither read nor left in a gradient; of a mask no copy of w is made."""
    gates, shape = np.float32(gates), (3 * size - edge, 3 * size)
    values = rng.standard_normal((7, size, size)).astype(as_dtype(dtype))
    dense = np.nan_to_num(ns.BlockSparse(values, KEPT, shape=shape).toarray().astype(np.float64))
    values[gates == 0] = np.nan
    w = ns.Tensor(ns.BlockSparse(values, KEPT, shape=shape).to("cuda"), requires_grad=True)
    used = w.T if "w.T" in call else w
    x, dy = (rng.standard_normal((5, n)).astype(as_dtype(dtype)) for n in used.shape)
    tx = ns.Tensor(ns.to_device(x), requires_grad=True)
    tg = ns.BlockSparse(gates.reshape(-1, 1, 1), KEPT).to("cuda")
    tg = ns.Tensor(tg, requires_grad=trained)
    if gates.max() == 1 and dtype != "float32":
        monkeypatch.setattr(matmul, "gated", None)
        monkeypatch.setattr(ops, "gated", None)
    places, into = [], sddmm.sddmm_into
    monkeypatch.setattr(
        sddmm, "sddmm_into", lambda *of: places.append(of[-1] is not None) or into(*of)
    )
    y = ns.matmul(tx, used, gate=tg if used is w else tg.T, kernel=kernel)
    y.backward(ns.to_device(dy))
    takes = kernel != "k6_hopper" or gates.max() == 1  # which else multiplies w by its gates before
    assert places == [takes and dtype != "float32"]
    times, x, dy = (
        spread(gates, ns.BlockSparse(values, KEPT, shape=shape)),
        *(a.astype(np.float64) for a in (x, dy)),
    )
    own = (dense * times).T if used is not w else dense * times
    close(y.data, x @ own, abs(x) @ abs(own), dtype, 3 * size)
    close(tx.grad.data, dy @ own.T, abs(dy) @ abs(own.T), dtype, 3 * size)
    of_w, of_size = (x.T @ dy, abs(x).T @ abs(dy)) if used is w else (dy.T @ x, abs(dy).T @ abs(x))
    assert w.grad.data.layout == w.data.layout
    close(w.grad.data, of_w * times, 2 * of_size * abs(times), dtype, 5)
    if trained:
        dots = ns.BlockSparse.from_dense(of_w * dense, KEPT, block_size=size).data.sum((1, 2))
        sizes = ns.BlockSparse.from_dense(of_size * abs(dense), KEPT, block_size=size)
        sizes = sizes.data.sum((1, 2)) * 4
        grad = tg.grad.data.data.reshape(-1)
        close(grad, dots * (gates != 0), sizes * (gates != 0), dtype, size * size)


def test_trained_gates_that_are_not_known_are_multiplied_once(rng):
    """By a launch before the product; the input-gradient takes what that left."""
    w = ns.BlockSparse(rng.standard_normal((7, 32, 32)).astype("f2"), KEPT).to("cuda")
    x, numbers = ns.to_device(np.ones((5, 96), "f2")), ns.to_device(np.float32(NUMBERS))
    unknown, known = ops.all_blocks(w, numbers), ops.select_gated(w, numbers)
    takes = [
        ops.multiplies_gates(x, w, kept, kernel, trained=trained)
        for kernel in ("k6_hopper", "k8_small_batch")
        for kept in (unknown, known)
        for trained in (False, True)
    ]
    assert takes == [True, False, False, False, True, True, True, True]
    mask = ops.select_gated(w, ns.to_device(np.float32(MASK)))
    assert ops.multiplies_gates(x, w, mask, "k6_hopper", trained=True)
    wide = w.with_values(ns.to_device(np.ones((7, 32, 32), "f4")))
    assert ops.multiplies_gates(
        ns.to_device(np.ones((5, 96), "f4")), wide, unknown, "k6_hopper", trained=True
    )


@pytest.mark.parametrize(("kernel", "dtype", "size", "edge"), KERNELS)
@pytest.mark.parametrize("trained", [False, True])
def test_gates_that_are_all_zero_leave_zeros(kernel, dtype, size, edge, trained):
    values = np.full((7, size, size), np.nan, as_dtype(dtype))
    w = ns.Tensor(ns.BlockSparse(values, KEPT).to("cuda"), requires_grad=True)
    gates = ns.Tensor(ns.to_device(np.zeros(7, np.float32)), requires_grad=trained)
    x = ns.Tensor(ns.to_device(np.ones((5, 3 * size), as_dtype(dtype))), requires_grad=True)
    y = ns.matmul(x, w, gate=gates, kernel=kernel)
    y.backward(ns.to_device(np.ones(y.shape, as_dtype(dtype))))
    found = [y.data, x.grad.data, w.grad.data.values, *([gates.grad.data] if trained else [])]
    assert not any(array.numpy().astype(np.float32).any() for array in found)


def test_views_that_begin_at_one_address_are_other_gates(rng):
    """What is known of one of them is not taken for another length, or for other strides."""
    buffer = ns.to_device(np.float32([1, 0, 1, 1]))
    for gates in (buffer[:2], buffer[::2], buffer[:1], buffer):
        dense = rng.standard_normal((8, 8 * gates.size)).astype(np.float32)
        w = ns.BlockSparse.from_dense(dense, np.ones((1, gates.size)), block_size=8)
        x = rng.standard_normal((3, 8)).astype(np.float32)
        y = ns.matmul(ns.to_device(x), w.to("cuda"), gate=gates)
        by = dense * np.repeat(gates.numpy(), 8)
        close(y, x.astype(np.float64) @ by, abs(x) @ abs(by), "float32", 8)
