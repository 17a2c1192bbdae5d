"""numbsparse.jax on a GPU, called by XLA."""

import threading
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: see CONTRIBUTING.md")

import jax.numpy as jnp  # noqa: E402

import numbsparse as ns  # noqa: E402
import numbsparse.jax as nsj  # noqa: E402
from numbsparse import device  # noqa: E402
from numbsparse.device import memory  # noqa: E402
from numbsparse.jax import products  # noqa: E402

pytestmark = pytest.mark.skipif(
    device.SIMULATED or jax.default_backend() != "gpu", reason="JAX has no GPU here"
)
SECONDS = 60  # of threads, before they are said to wait for each other


def drawn(*shape, dtype="float32", seed=0):
    host = np.random.default_rng(seed).standard_normal(shape)
    return host.astype(jnp.dtype(dtype))


def weights(dtype="float32", size=32, blocks=(12, 16)):
    layout = ns.Layout(ns.patterns.random(*blocks, 0.3, seed=0))
    values = 0.1 * drawn(layout.n_blocks, size, size, dtype="float64", seed=3)
    return nsj.BlockSparse(jnp.asarray(values.astype(jnp.dtype(dtype))), layout)


def close(got, expected, dtype="float32"):
    tolerance = 1e-4 if dtype == "float32" else 0.03
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.abs(ours - theirs).max(initial=0) <= tolerance * (
            1 + np.abs(theirs).max(initial=0)
        )


@pytest.fixture
def exact():
    """JAX's own products in float32, not tf32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize(
    ("rows", "size", "dtype"),
    [
        (0, 32, "float32"), (5, 8, "float32"), (5, 8, "bfloat16"), (40, 32, "float32"),
        (40, 32, "float16"), (700, 64, "bfloat16"),
    ],
)  # fmt: skip
def test_values_and_gradients_under_jit(rows, size, dtype, exact):
    w, x = weights(dtype, size), jnp.asarray(drawn(rows, 12 * size, dtype=dtype))

    def loss(dense):
        def of(x, w):
            y = x @ (w.to_dense() if dense else w)
            return (y.astype(jnp.float32) ** 2).sum() / max(rows, 1), y

        return jax.jit(jax.grad(of, (0, 1), has_aux=True))

    close(loss(False)(x, w), loss(True)(x, w), dtype)


def test_second_derivatives_and_vmap(exact):
    w, x = weights(size=8, blocks=(3, 4)), jnp.asarray(drawn(6, 24))
    several = jax.tree.map(lambda v: jnp.stack([v, 2 * v, -v]), w)

    def of(x, w, dense):
        return ((x @ (w.to_dense() if dense else w)) ** 3).sum()

    for transform in (
        lambda f: jax.hessian(f)(x[:2], w),
        lambda f: jax.vmap(jax.grad(f, 1), (0, None))(x, w),
        lambda f: jax.vmap(f, (None, 0))(x, several),
    ):
        got, expected = (transform(lambda x, w, d=d: of(x, w, d)) for d in (False, True))
        close(got, expected)


def test_buffers_are_those_of_xla_on_its_stream(monkeypatch):
    w, x = weights(), jnp.asarray(drawn(40, 384))
    product = jax.jit(lambda x, w: x @ w)
    first = product(x, w).block_until_ready()  # kept: into the same memory it would be replayed
    seen, matmul = [], products.ops.matmul

    def spy(a, b, out, **how):
        seen.append((a.address, b.values.address, out.address, device.current_stream().handle))
        return matmul(a, b, out=out, **how)

    monkeypatch.setattr(products.ops, "matmul", spy)
    monkeypatch.setattr(memory, "copy_in", None)
    monkeypatch.setattr(memory, "copy_out", None)
    y = product(x, w).block_until_ready()
    ((a, b, out, stream),) = seen
    assert a == x.unsafe_buffer_pointer()
    assert b == w.values.unsafe_buffer_pointer()
    assert out == y.unsafe_buffer_pointer() != first.unsafe_buffer_pointer()
    assert stream > 2


def test_products_are_in_order_with_the_work_of_xla(exact):
    w = weights(size=32, blocks=(8, 8))
    wide = jnp.asarray(drawn(2048, 2048, seed=5))

    @partial(jax.jit, static_argnums=2)
    def chain(x, w, dense):
        whole = w.to_dense() if dense else w

        def step(i, x):
            slow = jnp.tanh(wide @ wide * 1e-3)  # what a product without order would overtake
            return jnp.tanh(x + slow[:64, :256] * 1e-3) @ whole + x

        return jax.lax.fori_loop(0, 20, step, x)

    x = jnp.asarray(drawn(64, 256))
    expected = chain(x, w, True)
    first = chain(x, w, False)
    close(first, expected)
    for _ in range(5):  # XLA makes graphs of what is between the products, after a while
        np.testing.assert_array_equal(chain(x, w, False), first)


def test_a_step_is_trained_with_buffers_given_up(exact):
    w, x = weights(), jnp.asarray(drawn(64, 384))
    target = x @ weights().to_dense() * 0.5

    @partial(jax.jit, donate_argnums=0, static_argnums=2)
    def step(w, x, dense):
        def loss(w):
            return ((x @ (w.to_dense() if dense else w) - target) ** 2).mean()

        value, slope = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda v, g: v - 0.5 * g, w, slope), value

    found = []
    for dense in (False, True):
        ours, losses = jax.tree.map(jnp.copy, w), []
        for _ in range(10):
            ours, loss = step(ours, x, dense)
            losses.append(loss)
        found.append((ours, losses))
    close(*found)
    assert found[0][1][-1] < found[0][1][0]


def test_threads_of_python_share_a_layout(exact):
    w = weights()
    inputs = [jnp.asarray(drawn(n, 384, seed=n)) for n in (3, 40, 90, 40)]
    run = jax.jit(lambda x, w: [(x + i) @ w for i in range(5)])
    expected = [[(x + i) @ w.to_dense() for i in range(5)] for x in inputs]
    found = [[] for _ in inputs]

    def work(x, into):
        into.extend(jax.block_until_ready(run(x, w)) for _ in range(5))

    threads = [
        threading.Thread(target=work, args=both, daemon=True)  # so that one that waits ends too
        for both in zip(inputs, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), f"a thread waits after {SECONDS} s"
    for several, right in zip(found, expected, strict=True):
        assert len(several) == 5
        for got in several:
            close(got, right)


def test_arrays_that_ns_matmul_takes_come_back_as_they_came(exact):
    w, x = weights(), jnp.asarray(drawn(40, 384))
    ours = ns.BlockSparse(np.asarray(w.values), w.layout).to("cuda")
    for _ in range(20):
        y = ns.matmul(x * 1, ours)  # memory that XLA takes back at once
        close(y + jnp.zeros_like(y), x @ w.to_dense())
    assert type(y) is type(x)
    assert y.devices() == x.devices()


@pytest.mark.skipif(len(jax.devices()) < 2, reason="takes two GPUs")
def test_each_gpu_computes_its_shard(exact):
    """Products and gradients over two, whose threads call at once; and those of one, in turns."""
    devices, w, x = jax.devices()[:2], weights(), drawn(80, 384)
    mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
    rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()

    def loss(x, w):
        return (jnp.tanh(x @ w) ** 2).sum()

    def slopes(x, w):
        of_x, of_w = jax.grad(loss, (0, 1))(x, w)
        return of_x, jax.tree.map(lambda v: jax.lax.psum(v, "rows"), of_w)

    how = {"mesh": mesh, "in_specs": (rows, whole), "out_specs": (rows, whole), "check_vma": False}
    shared, alone = jax.jit(jax.shard_map(slopes, **how)), jax.jit(jax.grad(loss, (0, 1)))
    of_x, of_w = jax.grad(lambda x, v: loss(x, v), (0, 1))(jnp.asarray(x), w.to_dense())
    expected = of_x, nsj.BlockSparse.from_dense(of_w, w.layout, block_size=w.block_size)
    dealt = jax.device_put(x, jax.sharding.NamedSharding(mesh, rows))
    everywhere = jax.device_put(w, jax.sharding.NamedSharding(mesh, whole))
    for _ in range(20):
        close(shared(dealt, everywhere), expected)
        close(got := alone(dealt, everywhere), expected)
        assert got[0].sharding.spec == rows
        for gpu in devices:
            got = alone(jax.device_put(x, gpu), jax.device_put(w, gpu))
            assert got[0].devices() == got[1].values.devices() == {gpu}
            close(got, expected)
