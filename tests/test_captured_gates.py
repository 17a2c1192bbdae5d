"""Gates that only the GPU knows: what products pass over, and steps that are captured."""

import numpy as np
import pytest
from conftest import host
from gate_helpers import close, pattern, spread

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.device import Capture
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import k6_hopper
from numbsparse.kernels.matmul.k7_small_blocks import gated, strip_plan
from numbsparse.nn import functional as F
from numbsparse.testing import races

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator"),
]


@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("kernel", "dtype", "size", "edge", "call"),
    [
        ("k8_small_batch", "float16", 32, 0, "x @ w"),
        ("k8_small_batch", "bfloat16", 8, 3, "x @ w.T"),
        ("k8_small_batch", "float16", 16, 0, "w @ x"),
        ("k8_small_batch", "float32", 32, 0, "x @ w.T"),
        ("k8_small_batch", "float32", 8, 0, "x @ w"),
        ("k8_small_batch", "float16", 64, 5, "w.T @ x"),
        ("k7_small_blocks", "float16", 8, 3, "x @ w"),
        ("k7_small_blocks", "bfloat16", 16, 0, "w @ x"),
        ("k7_small_blocks", "float16", 16, 1, "x @ w.T"),
        ("k7_small_blocks", "bfloat16", 8, 5, "x @ w.T"),
        ("k7_small_blocks", "float32", 8, 3, "x @ w"),
        ("k7_small_blocks", "float32", 16, 1, "x @ w.T"),
        ("k7_small_blocks", "float32", 16, 5, "x @ w"),
        ("k7_small_blocks", "float16", 8, 0, "x @ w"),
        ("k7_small_blocks", "float32", 8, 0, "x @ w.T"),
        ("k7_small_blocks", "float32", 16, 0, "w @ x"),
        ("k7_small_blocks of a long batch", "float32", 16, 1, "x @ w"),
        ("k6_hopper", "float16", 32, 3, "x @ w"),
        ("k6_hopper", "bfloat16", 64, 8, "w.T @ x"),
        ("k6_hopper", "float32", 32, 0, "x @ w"),
        ("k6_hopper/2", "bfloat16", 32, 3, "x @ w.T"),  # a smaller tile
        ("k6_hopper/2", "float16", 64, 0, "x @ w"),
        ("k7_small_blocks of a long batch", "float16", 8, 3, "x @ w"),
        ("k7_small_blocks of a long batch", "bfloat16", 16, 1, "x @ w.T"),
        ("k6_hopper of a long batch", "float16", 32, 3, "x @ w"),
        ("k6_hopper of a long batch", "bfloat16", 64, 8, "w.T @ x"),
        ("k6_hopper/2 of a long batch", "float16", 64, 5, "x @ w"),
    ],
)
def test_a_kernel_that_takes_gates_gives_the_product_of_the_gated_weight(
    kernel, dtype, size, edge, call, rng, monkeypatch
):
    """Bit for bit, whether blocks are left out of the layout or passed over; the repairs too.

    Where a gate multiplies the sums of a block, not w, that is of powers of two.
    """
    kernel, _, is_long = kernel.partition(" ")
    if is_long:
        monkeypatch.setattr(k6_hopper, "FEW", dict.fromkeys(k6_hopper.BLOCK_SIZES, 0))
        monkeypatch.setattr(strip_plan, "PACK_FROM", 0)
        monkeypatch.setattr(strip_plan, "PACK_MUCH", {8: 0, 16: 0})
        monkeypatch.setattr(strip_plan, "PACK_FLOAT32_FROM", 0)
    values = rng.standard_normal((4, size, size)).astype(as_dtype(dtype))
    values[1] = values[3, size - edge :] = values[2, :, size - edge :] = np.nan
    shape = 2 * size - edge, 3 * size - edge
    w = ns.BlockSparse(values, [[1, 1, 1], [1, 0, 0]], shape=shape).to("cuda")
    of_sums = kernel == "k8_small_batch" and dtype == "float32" and size >= 32
    gates = ns.to_device(np.float32([0.5, 0, -4, 1] if of_sums else [0.3, 0, -1.7, 1]))
    used = w.T if "w.T" in call else w
    first = call.endswith("x")
    x = rng.standard_normal((used.shape[1], 5) if first else (5, used.shape[0]))
    x[2, 1] = np.inf if dtype == "float32" else 1
    x = ns.to_device(x.astype(as_dtype(dtype)))
    known, unknown = ops.select_gated(w, gates), ops.all_blocks(w, gates)
    assert (known.layout.n_blocks, unknown.layout.n_blocks) == (3, 4)
    for kept in (known, unknown):
        gated = ops.gated(w, gates, kept)
        gated = gated.T if used is not w else gated
        got, right = (
            host(ops.matmul(*((m, x) if first else (x, m)), gate=g, kernel=kernel))
            for m, g in ((used, kept), (gated, None))
        )
        same = ~np.isnan(right.astype(np.float32)) | (kept is known)  # infinity times 0 otherwise
        np.testing.assert_array_equal(got[same], right[same])
        assert np.isfinite(got.astype(np.float32)).all() == (dtype != "float32")


@pytest.mark.parametrize(("dtype", "size"), [("float16", 8), ("bfloat16", 16), ("float32", 8)])
def test_gates_are_read_again_after_a_strip_without_blocks(dtype, size, rng):
    """What was known ahead was of that strip, and the next one is of other rows of the batch."""
    kept = np.repeat([[1, 1, 0]] * 5, 128 // size, axis=1)  # strips of 128 columns
    kept[1:] &= rng.random(kept[1:].shape) < 0.3  # so many in each strip, about
    values = rng.standard_normal((int(kept.sum()), size, size)).astype(as_dtype(dtype))
    numbers = rng.choice(np.float32([0, 0.5, 1, -2]), len(values))
    values[numbers == 0] = np.nan
    w, gates = ns.BlockSparse(values, kept).to("cuda"), ns.to_device(numbers)
    x = ns.to_device(rng.standard_normal((128, 5 * size)).astype(as_dtype(dtype)))
    unknown = ops.all_blocks(w, gates)
    got = host(ops.matmul(x, w, gate=unknown, kernel="k7_small_blocks"))
    dense, wide = ops.gated(w, gates, unknown).toarray().astype(np.float64), host(x).astype(float)
    close(got, wide @ dense, abs(wide) @ abs(dense), dtype, x.shape[1])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size", "edge"),
    [("float16", 8, 0), ("bfloat16", 8, 3), ("float16", 16, 1), ("float32", 8, 2)],
)
def test_an_infinite_gate_multiplies_what_is_there_alone(
    dtype, size, edge, packed, rng, monkeypatch
):
    """Neither the zeros beyond the last feature nor those where a step has one block of two."""
    if packed:
        monkeypatch.setattr(strip_plan, "PACK_FROM", 0)
        monkeypatch.setattr(strip_plan, "PACK_MUCH", {8: 0, 16: 0})
        monkeypatch.setattr(strip_plan, "PACK_FLOAT32_FROM", 0)
    kept = np.bool_([[1, 1, 0], [1, 0, 0], [0, 1, 1]])
    values = 1 + rng.random((int(kept.sum()), size, size)).astype(as_dtype(dtype))
    w = ns.BlockSparse(values, kept, shape=(3 * size - edge, 3 * size)).to("cuda")
    x = ns.to_device(1 + rng.random((5, 3 * size - edge)).astype(as_dtype(dtype)))
    for block, column in enumerate(w.layout.index.block_columns):
        gates = np.float32(np.where(np.arange(w.n_blocks) == block, np.inf, 1))
        how = {"kernel": "k7_small_blocks", "precision": "high"}
        y = host(ops.matmul(x, w, gate=ops.all_blocks(w, ns.to_device(gates)), **how))
        of_column = np.repeat(np.arange(3) == column, size)
        assert (np.isinf(y.astype(np.float32)) == of_column).all()
        assert not np.isnan(y.astype(np.float32)).any()


@pytest.mark.parametrize(("dtype", "call"), [("float16", "x @ w"), ("float32", "x @ w.T")])
def test_x_is_not_read_where_all_gates_of_a_step_are_zero(dtype, call, rng):
    """By a kernel that takes no gates, where only the GPU knows them."""
    kept, size = np.array([[1, 0, 1], [1, 1, 0]], bool), 32
    w = ns.BlockSparse(rng.standard_normal((4, size, size)).astype(dtype), kept).to("cuda")
    used, gone = (w, 1) if call == "x @ w" else (w.T, 2)  # all of whose gates are zero
    gates = np.float32([0.5, 0, 0, 3 * (gone == 2)])
    x = rng.standard_normal((3, used.shape[0])).astype(dtype)
    dense = F.scale_blocks(w, ns.to_device(gates)).numpy()
    dense = dense if used is w else dense.T
    right = x.astype(np.float64) @ dense
    x[:, gone * size : (gone + 1) * size] = np.nan
    kept = ops.all_blocks(w, ns.to_device(gates))
    how = {"kernel": "k6_hopper", "precision": "high"}
    y = host(ops.matmul(ns.to_device(x), used, gate=kept, **how))
    bound = 2 ** (-9 if dtype == "float16" else -8) * (abs(np.nan_to_num(x)) @ abs(dense))
    assert (abs(y - right) <= bound).all()


@pytest.mark.parametrize("places", [0, 99], ids=["many stages", "few"])
@pytest.mark.parametrize(
    ("dtype", "size", "edge", "transposed"),
    [
        ("float16", 8, 3, False),
        ("bfloat16", 8, 0, True),
        ("float16", 16, 0, True),
        ("float32", 8, 1, True),
        ("float32", 16, 0, False),
    ],
)
@pytest.mark.pairs
def test_small_blocks_that_gates_leave_are_put_together_anew(
    dtype, size, edge, transposed, places, rng, monkeypatch
):
    """Of columns with many blocks, in several stages; x is not read where none needs it."""
    monkeypatch.setattr(gated, "multiprocessors", lambda: places)
    monkeypatch.setattr(gated, "MANY", 32)  # fewer threads than a stage has blocks
    monkeypatch.setattr(gated, "FEW", 64)
    monkeypatch.setattr(strip_plan, "PACK_FROM", 0)
    monkeypatch.setattr(strip_plan, "PACK_MUCH", {8: 0, 16: 0})
    kept = rng.random((29, 9)) < 0.4
    shape = kept.shape[0] * size - edge, kept.shape[1] * size
    values = rng.standard_normal((int(kept.sum()), size, size)).astype(as_dtype(dtype))
    w = ns.BlockSparse(values, kept, shape=shape)
    index, gates = w.layout.index, np.float32(rng.integers(-1, 3, len(values)))
    lines = index.block_columns if transposed else index.block_rows
    gone = (lines < 4) | (lines >= 24)
    gates[gone] = 0
    dense = w.toarray().astype(np.float64) * spread(gates, w)
    values[gates == 0] = np.nan
    w, gate = w.to("cuda"), ns.to_device(gates)
    used, dense = (w.T, dense.T) if transposed else (w, dense)
    x = rng.standard_normal((20, used.shape[0])).astype(as_dtype(dtype))
    wide = x.astype(np.float64)
    x[:, : 4 * size] = x[:, 24 * size :] = np.nan
    y = ns.to_device(np.full((20, used.shape[1]), np.nan, as_dtype(dtype)))
    how = {"gate": ops.all_blocks(w, gate), "kernel": "k7_small_blocks", "out": y}
    ops.matmul(ns.to_device(x), used, **how)
    close(y, wide @ dense, abs(wide) @ abs(dense), dtype, max(shape))


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
@pytest.mark.parametrize(
    ("kernel", "dtype", "size", "batch", "packs"),
    [
        ("k6_hopper", "float16", 32, 40, False),
        ("k7_small_blocks", "float16", 8, 40, False),
        ("k7_small_blocks", "float16", 8, 40, True),
        ("k7_small_blocks", "float32", 16, 40, True),
        ("k8_small_batch", "float16", 8, 9, False),
        ("k8_small_batch", "float32", 32, 33, False),
    ],
)
def test_kernels_that_multiply_gates_do_not_race(
    kernel, dtype, size, batch, packs, rng, monkeypatch
):
    """In more steps than a ring has stages, some of which have no block that is left."""
    monkeypatch.setattr(strip_plan, "is_packed", lambda *sizes: packs)
    layout = ns.Layout(rng.random((5, 3)) < 0.7)
    gates = ns.to_device(np.float32(rng.choice([0, 0.5, 1, 2], layout.n_blocks)))
    values = rng.standard_normal((layout.n_blocks, size, size)).astype(dtype)
    w = ns.BlockSparse(values, layout).to("cuda")
    x = ns.to_device(rng.standard_normal((batch, 5 * size)).astype(dtype))
    how = {"gate": ops.all_blocks(w, gates), "kernel": kernel}
    assert races(lambda: ops.matmul(x, w, **how)) == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_blocks_anywhere_in_memory_have_the_same_dot_products(dtype, rng):
    a, b = rng.standard_normal((2, 3, 8, 8)).astype(dtype)
    gates = ns.to_device(np.float32([1, 0, 2]))
    kept = ops.all_blocks(ns.BlockSparse(a, pattern()).to("cuda"), gates)
    right = (a.astype(np.float64) * b).sum((1, 2)) * [1, 0, 1]
    for first in (0, 1):  # the second of 16 bytes
        one, two = (
            ns.to_device(np.append(np.zeros(first, dtype), x))[first:].reshape(x.shape)
            for x in (a, b)
        )
        assert (one.address % 16 == 0) == (first == 0)
        np.testing.assert_allclose(ops.block_dots(one, two, kept).numpy(), right, rtol=1e-3)


def test_a_captured_step_skips_nothing_and_gives_the_same(rng):
    w = ns.BlockSparse(rng.standard_normal((3, 4, 4)).astype(np.float32), pattern()).to("cuda")
    x = ns.to_device(rng.standard_normal((2, 8)).astype(np.float32))

    def step(x, gate):
        tw, tg = ns.Tensor(w, requires_grad=True), ns.Tensor(gate, requires_grad=True)
        y = ns.matmul(x, tw, gate=tg)
        y.backward(ops.full(y.shape, 1.0, np.float32, "cuda"))
        return y.data, tw.grad.data.values, tg.grad.data

    given = [ns.to_device(np.float32(g)) for g in ([1, 0, 2], [0, 3, 0], [1, 1, 1], [0, 0, 0])]
    right = [[host(a) for a in step(x, gate)] for gate in given]
    captured = ns.graph(step)
    for nth, i in enumerate((0, 2, 2, 1, 1, 3, 0)):  # as it is, captured, replayed
        if nth in (1, 3):
            device.forget_captures()  # so the step runs as it is again, with other gates
        for got, wanted in zip(captured(x, given[i]), right[i], strict=True):
            np.testing.assert_allclose(host(got), wanted, rtol=1e-6, atol=1e-6)
    if device.SIMULATED:
        strange = ns.BlockSparse(np.full((3, 4, 4), np.nan, np.float32), w.layout).to("cuda")
        with Capture().under_way():
            whole = F.scale_blocks(strange, given[0]).matrix
        assert whole.layout is w.layout
        assert (whole.values.numpy()[1] == 0).all()
