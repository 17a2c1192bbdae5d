"""Parts of kernels, each alone."""

import numpy as np
import pytest
from numba import cuda, float32, uint32, uint64
from ptx_helpers import on_hopper

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import card, ptx
from numbsparse.kernels.parts import turns
from numbsparse.kernels.parts.records import walking
from numbsparse.kernels.parts.ring import begin_ring, following
from numbsparse.kernels.ptx import ALIGNMENT

pytestmark = on_hopper
RECORD, ROWS = 3, 16


def test_registers_are_shared_by_all_threads_that_a_multiprocessor_holds(monkeypatch):
    """65,536 of them, by eights, to four warps at once; an instruction names 255 at most."""
    monkeypatch.setattr(card, "SIMULATED", False)
    shared = {512: 128, 576: 96, 640: 96, 1152: 56, 256: 248, 128: 248}
    assert {n: card.registers(n)["max_registers"] for n in shared} == shared
    assert card.registers(256, most=255) == {"max_registers": 255}
    monkeypatch.setattr(card, "SIMULATED", True)
    assert card.registers(512) == {}


@cuda.jit
def around_kernel(stages, out):
    stage, phase = uint32(0), uint32(0)
    for i in range(out.shape[0]):
        out[i, 0], out[i, 1] = stage, phase
        stage, phase = following(stage, phase, stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_stages_follow_one_another_and_each_round_is_a_phase(stages):
    out = device.to_device(np.full((20, 2), 99, np.uint32))
    launch(around_kernel, 1, 1, stages, out)
    rounds, stage = np.divmod(np.arange(20), stages)
    np.testing.assert_array_equal(out.numpy(), np.stack([stage, rounds % 2], 1))


def walk_kernel(stages, fetchers, cluster):
    @cuda.jit(device=True)
    def ask(step, row, stage, bars, out):
        for e in range(RECORD):
            out[step[0], e] = step[e]
        out[step[0], RECORD] = row
        out[step[0], RECORD + 1] = stage
        ptx.mbarrier_arrive(bars, stage)

    walk = walking(RECORD, stages, ask, fetchers, cluster)
    n_bars = 2 * stages

    @cuda.jit
    def kernel(records, tiles, first, last, out):
        """`fetchers` warps ask, one more empties each stage when it is full."""
        bars = cuda.shared.array(n_bars, uint64)
        t = uint32(cuda.threadIdx.x)
        if t == 0:
            begin_ring(bars, 0, stages, 1, 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if t // 32 < fetchers:
            walk(t // 32, records, tiles, ROWS, first, last, bars, (), out)
        else:
            stage, phase = uint32(0), uint32(0)
            for i in range(first, last):
                for _ in range(tiles[i, 2], tiles[i, 3]):
                    ptx.mbarrier_wait(bars, stage, phase)
                    ptx.sync_warp()
                    if t % 32 == 0:
                        ptx.mbarrier_arrive(bars, stages + stage)
                    stage, phase = following(stage, phase, stages)

    return kernel


@pytest.mark.parametrize(("stages", "fetchers", "cluster"), [(3, 1, 1), (4, 2, 2), (2, 2, 1)])
@pytest.mark.parametrize("lengths", [(1,), (3, 40, 33), (32, 64, 1, 5)])
def test_every_record_is_asked_for_once_in_the_stage_of_its_turn(
    stages, fetchers, cluster, lengths, rng
):
    ends = np.cumsum(lengths)
    tiles = [(0, n + 5, end - lengths[n], end) for n, end in enumerate(ends)]
    first = len(tiles) > 2  # a block of threads need not begin with the first tile
    records = rng.integers(0, 2**32, (ends[-1] + 32, RECORD), dtype=np.uint32)
    records[:, 0] = np.arange(len(records))
    out = device.to_device(np.full((ends[-1], RECORD + 2), 2**32 - 1, np.uint32))
    args = (device.to_device(a) for a in (records, np.array(tiles, np.int32)))
    kernel = walk_kernel(stages, fetchers, cluster)
    launch(kernel, cluster, 32 * (fetchers + 1), *args, int(first), len(tiles), out,
           cluster=(cluster,) if cluster > 1 else None)  # fmt: skip
    skipped = lengths[0] if first else 0
    got = out.numpy()[skipped:]
    np.testing.assert_array_equal(got[:, :RECORD], records[skipped : ends[-1]])
    np.testing.assert_array_equal(got[:, -1], np.arange(len(got)) % stages)
    of = np.repeat(np.arange(len(tiles)), lengths)[skipped:]
    rows = got[:, RECORD] // ROWS  # of either block of a cluster, which both write here
    assert np.isin(rows - (of + 5) * cluster, range(cluster)).all()


def turns_kernel(dtype, parts, items):
    add = turns.add_in_turn(dtype, SIDE, 32, parts)
    size = COUNT * SIDE * SIDE

    @cuda.jit
    def kernel(values, blocks, sums):
        own = cuda.shared.array(size, float32, ALIGNMENT)
        item, piece = cuda.blockIdx.x % items, cuda.blockIdx.x // items
        for i in range(cuda.threadIdx.x, size, 32):
            own[i] = values[piece, item, i]
        cuda.syncthreads()
        add(own, blocks, item * COUNT, COUNT, piece, item, sums)

    return kernel


SIDE, COUNT = 8, 3  # of a block, and blocks of an item


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("dtype", "parts"), [("float32", 1), ("float32", 2), ("float16", 2)])
def test_pieces_are_added_in_their_order(dtype, parts, pieces, rng):
    items = 2
    shape = (pieces, items, COUNT, SIDE, SIDE)
    values = (
        rng.standard_normal(shape) * [[[[[1.0]]]], [[[[2.0**24]]]], [[[[-(2.0**24)]]]]][:pieces]
    )
    values = values.astype(np.float32) / 2**13
    blocks = rng.permutation(2 * parts**2)[: items * COUNT].astype(np.int32)
    blocks = np.append(blocks, [-1] * (items * COUNT - blocks.size)).astype(np.int32)
    before = np.full((2, parts * SIDE, parts * SIDE), 9, dtype)
    result = device.to_device(before)
    sums = turns.sums_into(result, items, pieces)
    given = device.to_device(values.reshape(pieces, items, -1))
    launch(
        turns_kernel(dtype, parts, items), items * pieces, 32, given, device.to_device(blocks), sums
    )
    expected = before.copy()
    for values_of, number in zip(
        values.reshape(pieces, -1, SIDE, SIDE).swapaxes(0, 1), blocks, strict=True
    ):
        total = values_of[0]
        for piece in values_of[1:]:
            total = total + piece
        block, row, column = number // parts**2, number // parts % parts, number % parts
        if number >= 0:
            tile = expected[block, row * SIDE :][:SIDE, column * SIDE :][:, :SIDE]
            tile[...] = total
    np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.parametrize("items", [1, 7, 132, 133, 1000])
@pytest.mark.parametrize("tiles", [1, 3, 64, 4096])
def test_items_are_cut_so_that_all_end_soonest(items, tiles):
    def time(pieces):
        return -(-items * pieces // 132) * -(-tiles // pieces) + turns.TURN * pieces

    pieces = turns.pieces_of(items, tiles, 132)
    assert 1 <= pieces <= max(1, tiles // turns.LEAST_TILES)
    assert time(pieces) <= min(map(time, range(1, max(1, tiles // turns.LEAST_TILES) + 1)))
    assert pieces == 1 or time(pieces - 1) > time(pieces)
    assert (pieces > 1) == (items != 132 and tiles > 3)
