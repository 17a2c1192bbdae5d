"""k8_small_batch lists what gates leave in each share, and deals it to the warps anew."""

import numpy as np
import pytest
from conftest import host
from gate_helpers import close, spread

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul.k8_small_batch import blocks, launch


def problem_of(dtype, size, edge, part, rng):
    """(the pattern, the shape, gates): one column without blocks, one that is full."""
    kept = rng.random((min(160 // size + 2, 12), 192 // size)) < 0.6
    kept[:, 1], kept[:, 2] = False, True
    numbers = rng.choice(np.float32([1, 0.3, -1.7]), int(kept.sum()))
    left = rng.random(len(numbers)) < part
    if part == 1:  # in every other line of either kind none
        left = (np.stack(np.nonzero(kept)) % 2 == 1).all(0)
    gates = np.where(left, numbers, np.float32(0))
    return kept, tuple(n * size - edge for n in kept.shape), gates


PARTS = [(0.5, 0), (0.1, 0), (0.95, 0), (0.0, 0), (1, 0), (0.5, 99), (0.0, 99)]
PROBLEMS = [
    ("float32", 32, 5, 0, False),
    ("float32", 8, 9, 3, True),
    ("float32", 32, 20, 5, True),
    ("float16", 16, 3, 0, False),
    ("float16", 64, 40, 0, True),
    ("bfloat16", 32, 70, 0, False),
]


@pytest.mark.parametrize(
    ("part", "listed_from", "dtype", "size", "batch", "edge", "transposed"),
    [
        (*part, *problem)
        for n, part in enumerate(PARTS)
        for m, problem in enumerate(PROBLEMS)
        # In the simulator each problem with the first, and with every third of the others.
        if not device.SIMULATED or n == 0 or (n + m) % 3 == 0
    ],
)
def test_lines_that_several_warps_and_shares_have(
    part, listed_from, dtype, size, batch, edge, transposed, rng, monkeypatch
):
    monkeypatch.setattr(launch, "LISTED_FROM", listed_from)
    kept, shape, gates = problem_of(dtype, size, edge, part, rng)
    values = rng.standard_normal((len(gates), size, size)).astype(as_dtype(dtype))
    values[gates == 0] = np.nan  # which is not read
    w = ns.BlockSparse(values, kept, shape=shape).to("cuda")
    used, given = w.T if transposed else w, ops.all_blocks(w, ns.to_device(gates))
    x = rng.standard_normal((batch, used.shape[0])).astype(as_dtype(dtype))
    got, *again = (
        host(ops.matmul(ns.to_device(x), used, gate=given, kernel="k8_small_batch"))
        for _ in range(2 if (part, listed_from) == PARTS[0] else 1)
    )
    for each in again:
        np.testing.assert_array_equal(got, each)
    gated = np.nan_to_num(values.astype(np.float64)) * gates[:, None, None]
    dense = ns.BlockSparse(gated, kept, shape=shape).toarray()
    dense, wide = dense.T if transposed else dense, x.astype(np.float64)
    close(got, wide @ dense, abs(wide) @ abs(dense), dtype, len(dense))


@pytest.mark.parametrize("part", [0.5, 0.0])
@pytest.mark.parametrize(
    ("dtype", "size", "batch", "edge"),
    [
        ("float32", 32, 5, 0),
        ("float32", 8, 70, 3),
        ("float16", 16, 33, 0),
        ("float16", 64, 40, 0),
        ("bfloat16", 32, 9, 5),
    ],
)
def test_a_weight_gradient_leaves_others_as_they_were(
    part, dtype, size, batch, edge, rng, monkeypatch
):
    monkeypatch.setattr(blocks, "GATED_FROM", (0, 0))
    monkeypatch.setattr(launch, "n_shares", lambda: 3)  # with more of them warps share a unit
    kept, shape, gates = problem_of(dtype, size, edge, part, rng)
    x, dy = (rng.standard_normal((batch, n)).astype(as_dtype(dtype)) for n in shape)
    values = ns.to_device(np.full((len(gates), size, size), 7, x.dtype))
    operands = ns.to_device(x).T, ns.to_device(dy), ns.Layout(kept), "k8_small_batch"
    got = ops.sddmm_into(values, *operands, "highest", ns.to_device(gates))
    left = spread(gates != 0, got) != 0
    a, b = x.astype(np.float64), dy.astype(np.float64)
    found = np.where(left, host(got).astype(np.float64), 0)
    close(found, a.T @ b * left, abs(a).T @ abs(b) * left, dtype, batch)
    assert (values.numpy()[gates == 0] == 7).all()


@pytest.mark.parametrize(("part", "room"), [(0.5, 1), (0.03, 1), (0.0, 1), (0.5, 0)])
@pytest.mark.parametrize(
    ("dtype", "size", "transposed"),
    [("float32", 32, False), ("float16", 8, True), ("float16", 16, False)],
)
@pytest.mark.pairs
def test_warps_of_more_units_than_lanes(part, room, dtype, size, transposed, rng, monkeypatch):
    """Their runs are walked 32 units at a time, with lines that go on from one walk to the next;
    where there is no room for a list each unit's gates are looked at, and nothing is walked. Three
    walks are all there is to see: the first, one between two, and the last."""
    monkeypatch.setattr(launch, "n_shares", lambda: 1)
    monkeypatch.setattr(launch, "MOST_LISTED", room * launch.MOST_LISTED)
    kept = rng.random((3, 5)) < 0.8
    kept = np.kron(kept, np.ones((40 // size + 3 if room else 40 // size,) * 2, bool))
    gates = np.where(rng.random(int(kept.sum())) < part, np.float32(-0.5), np.float32(0))
    values = rng.integers(-4, 5, (len(gates), size, size)).astype(dtype)
    w = ns.BlockSparse(values, kept).to("cuda")
    used, given = w.T if transposed else w, ops.all_blocks(w, ns.to_device(gates))
    x = rng.integers(-4, 5, (3, used.shape[0])).astype(dtype)
    got = host(ops.matmul(ns.to_device(x), used, gate=given, kernel="k8_small_batch"))
    dense = ns.BlockSparse(values.astype(np.float64) * gates[:, None, None], kept).toarray()
    np.testing.assert_array_equal(got, x.astype(np.float64) @ (dense.T if transposed else dense))


@pytest.mark.parametrize(("dtype", "size", "batch"), [("float32", 32, 9), ("float16", 64, 20)])
def test_layouts_made_on_a_gpu(dtype, size, batch, rng, monkeypatch):
    monkeypatch.setattr(launch, "LISTED_FROM", 0)
    monkeypatch.setattr(blocks, "GATED_FROM", (0, 0))
    kept, shape, gates = problem_of(dtype, size, 0, 0.5, rng)
    rows, columns = (ns.to_device(a.astype(np.int32)) for a in np.nonzero(kept))
    made = ns.Layout.on_device(rows, columns, kept.shape, capacity=len(gates) + 3)
    values = rng.standard_normal((len(gates) + 3, size, size)).astype(as_dtype(dtype))
    w, more = ns.BlockSparse(ns.to_device(values), made), np.zeros(3, np.float32)
    given = ops.all_blocks(w, ns.to_device(np.concatenate([gates, more])))
    x, dy = (rng.standard_normal((batch, n)).astype(as_dtype(dtype)) for n in shape)
    got = host(ops.matmul(ns.to_device(x), w, gate=given, kernel="k8_small_batch"))
    gated = values[: len(gates)].astype(np.float64) * gates[:, None, None]
    dense, wide = ns.BlockSparse(gated, kept).toarray(), x.astype(np.float64)
    close(got, wide @ dense, abs(wide) @ abs(dense), dtype, len(dense))
    dw = ops.sddmm(ns.to_device(x).T, ns.to_device(dy), given, kernel="k8_small_batch").values
    found = np.where(gates[:, None, None] != 0, host(dw)[: len(gates)].astype(np.float64), 0)
    right = ns.BlockSparse.from_dense(wide.T @ dy.astype(np.float64), kept, block_size=size)
    of = ns.BlockSparse.from_dense(abs(wide).T @ abs(dy.astype(np.float64)), kept, block_size=size)
    left = gates[:, None, None] != 0
    close(found, right.data * left, of.data * left, dtype, batch)
    assert (host(dw)[len(gates) :] == 0).all()
