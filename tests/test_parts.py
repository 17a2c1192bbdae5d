"""Parts of kernels, each alone."""

from functools import reduce

import numpy as np
import pytest
from numba import cuda, float32, uint32, uint64
from ptx_helpers import on_hopper

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import card, ptx
from numbsparse.kernels.conv.k4_wgmma import weight_grad_sums as parts_of_sums
from numbsparse.kernels.conv.k4_wgmma.weight_grad_sums import (
    leave_piece,
    place_in_block,
    sums_into,
)
from numbsparse.kernels.parts.pieces import AT_ONCE, Added, add_pieces
from numbsparse.kernels.parts.records import walking
from numbsparse.kernels.parts.ring import begin_ring, following
from numbsparse.kernels.parts.store import KINDS
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


SIDE, COUNT = 8, 3  # of a block, and blocks of an item


def pieces_kernel(dtype, parts, items, slices):
    leave, place = leave_piece(dtype, SIDE, 32, parts), place_in_block(SIDE)
    values_of, size = SIDE * SIDE, slices * COUNT * SIDE * SIDE

    @cuda.jit
    def kernel(values, blocks, sums):
        own = cuda.shared.array(size, float32, ALIGNMENT)
        item, piece = cuda.blockIdx.x % items, cuda.blockIdx.x // items
        for i in range(cuda.threadIdx.x, size, 32):
            line, column = uint32(i // SIDE % SIDE), uint32(i % SIDE)
            own[i // values_of * values_of + place(line, column)] = values[piece, item, i]
        cuda.syncthreads()
        leave(own, slices, blocks[item * COUNT :], COUNT, piece, sums)

    return kernel


@pytest.mark.parametrize("pieces", [1, 3, 10])  # also more than are read at once
@pytest.mark.parametrize(
    ("dtype", "parts", "slices"), [("float32", 1, 1), ("float32", 2, 2), ("float16", 2, 1)]
)
def test_pieces_are_added_in_their_order(dtype, parts, slices, pieces, rng):
    """Their sums differ by it: the second ones are large, and the third ones take those away."""
    items = 3
    sizes = np.resize([1.0, 2.0**24, -(2.0**24)], (pieces, 1, 1, 1, 1, 1))
    values = rng.standard_normal((pieces, items, slices, COUNT, SIDE, SIDE))
    values[1::3] = values[2::3] = rng.standard_normal(values.shape[1:]) if pieces > 1 else 0
    values = (values * sizes / 2**13).astype(np.float32)
    blocks = rng.permutation(2 * parts**2).astype(np.int32)
    blocks = np.append(blocks, [-1] * (items * COUNT - blocks.size)).astype(np.int32)
    result = device.to_device(np.full((2, parts * SIDE, parts * SIDE), np.nan, dtype))
    sums = sums_into(result, pieces)
    given = device.to_device(values.reshape(pieces, items, -1)), device.to_device(blocks)
    launch(pieces_kernel(dtype, parts, items, slices), items * pieces, 32, *given, sums)
    if pieces > 1:
        of = Added(parts * SIDE, parts * SIDE, KINDS.get(dtype), all=True)
        add_pieces(of, (2, pieces), sums.saved, (), (pieces, 2), sums.result, True)
    of_blocks = sum(values[:, :, s] for s in range(slices)).reshape(pieces, -1, SIDE, SIDE)
    ways = 4 if pieces > 2 * AT_ONCE else 1  # threads that share them
    total = np.zeros_like(of_blocks[0])
    for way in range(ways):
        total = total + reduce(np.add, of_blocks[way::ways])
    got = result.numpy()
    for right, number in zip(total, blocks, strict=True):
        block, row, column = number // parts**2, number // parts % parts, number % parts
        if number >= 0:
            tile = got[block, row * SIDE :][:SIDE, column * SIDE :][:, :SIDE]
            np.testing.assert_array_equal(tile, right.astype(dtype))


@pytest.mark.parametrize("values", [1, 10**6])
@pytest.mark.parametrize("items", [1, 7, 132, 133, 1000])
@pytest.mark.parametrize("tiles", [1, 3, 64, 4096])
def test_items_are_cut_so_that_all_end_soonest(items, tiles, values):
    def time(pieces):
        adding = parts_of_sums.BEHIND + parts_of_sums.SAVED * pieces * values
        rounds = -(-items * pieces // 132) * (parts_of_sums.BEGIN - (-tiles // pieces))
        return rounds + (adding if pieces > 1 else 0)

    pieces = parts_of_sums.pieces_of(items, tiles, 132, values)
    assert 1 <= pieces <= min(tiles, 132)
    assert time(pieces) == min(map(time, range(1, min(tiles, 132) + 1)))
    assert pieces == 1 or time(pieces - 1) > time(pieces)
    assert pieces == 1 or not (items == 132 or tiles == 1)
    assert pieces > 1 or not (items == 1 and tiles >= 64)
