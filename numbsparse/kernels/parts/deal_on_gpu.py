"""`deal`'s schedules for layouts made on a GPU, worked out there: pieces in turn, longest first.

The host deals each piece to the place that is free first. Here all pieces, longest first, are dealt
round by round, every other round backwards, so that the place with the longest of one round gets
the shortest of the next. Each place then takes its own by rows, so that all go down x together and
its rows stay in the L2 cache.

What gates leave of the groups of a layout that the host dealt stays where it was, unless that has
become uneven: of blocks of 128 and half of the gates zero the longest place took 1.16 to 1.3 times
the mean, and all alike when dealt anew.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.parts.deal import TILE_STEPS, schedule
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.kernels.ptx import let_next_kernel_start, shfl_xor, wait_for_earlier_kernels
from numbsparse.layout import Index

UNEVEN = 1.08  # times the mean that the longest place may take, or tiles are dealt anew


class LengthsOnGPU:
    """Where the steps of each group begin, and how many they are."""

    def __init__(self, groups: int):
        self.starts, self.steps = empty((groups,), np.int32), empty((groups,), np.int32)


@cache
def ranking(length_of: Any) -> Any:
    """rank(i, n, of): how many of n pieces are longer than piece i, or as long and before it.

    By a whole warp. length_of(of, i) is the length of a piece.
    """

    @cuda.jit(device=True)
    def rank(i, n, of):
        own, before = length_of(of, i), int32(0)
        for other in range(cuda.threadIdx.x % 32, n, 32):
            length = length_of(of, other)
            if length > own or (length == own and other < i):
                before += int32(1)
        for k in range(5):
            before += int32(shfl_xor(int32(before), uint32(1 << k)))
        return before

    return rank


@on_gpu_of(schedule)
def schedule_on_gpu(
    index: Index, lengths: LengthsOnGPU, row_tiles: int, units: int, together: int = 1
) -> tuple[DeviceArray, DeviceArray]:
    groups = lengths.steps.size
    places = min(units, row_tiles * groups)
    tiles, starts = empty((row_tiles * groups, 4), np.int32), empty((places + 1,), np.int32)
    args = lengths.starts, lengths.steps, row_tiles, places, tiles, starts
    launch(tiles_kernel, groups, 32, *args, overlap=True)
    return tiles, starts


@cuda.jit(device=True)
def steps_of(steps, group):
    return steps[group]


@cuda.jit(device=True)
def divided(n, by):
    """n // by, n % by of numbers below 2^32: of 64 bits the compiler calls a subroutine."""
    n, by = uint32(n), uint32(by)
    return int32(n // by), int32(n % by)


@cuda.jit(device=True)
def start_of(unit, count, places):
    """How many of `count` pieces the places before this one have."""
    rounds, rest = divided(count, places)
    more = min(unit, rest) if rounds % 2 == 0 else max(unit - (places - rest), 0)
    return unit * rounds + more


@cuda.jit(device=True)
def other_way(turn, n, places):
    """The place of the n-th piece of a round, or the piece of the n-th place."""
    return n if turn % 2 == 0 else places - 1 - n


rank = ranking(steps_of)


@cuda.jit(device=True)
def deal_in_turns(group, firsts, steps, row_tiles, places, tiles, starts):
    """The tiles of a group, by a warp."""
    lane, groups = cuda.threadIdx.x % 32, steps.size
    at, count = rank(group, groups, steps), row_tiles * groups
    for row in range(lane, row_tiles, 32):
        turn, nth = divided(at * row_tiles + row, places)
        unit = other_way(turn, nth, places)
        to = start_of(unit, count, places)
        own = start_of(unit + 1, count, places) - to
        for other in range(own):  # which of the place's pieces come before
            of_row = divided(other * places + other_way(other, unit, places), row_tiles)[1]
            if of_row < row or (of_row == row and other < turn):
                to += 1
        tiles[to, 0], tiles[to, 1] = group, row
        tiles[to, 2], tiles[to, 3] = firsts[group], firsts[group] + steps[group]
    for unit in range(group * 32 + lane, places + 1, groups * 32):
        starts[unit] = start_of(unit, count, places)


@cuda.jit
def tiles_kernel(firsts, steps, row_tiles, places, tiles, starts):
    let_next_kernel_start()
    wait_for_earlier_kernels()
    deal_in_turns(cuda.blockIdx.x, firsts, steps, row_tiles, places, tiles, starts)


@cuda.jit(device=True)
def deal_again(firsts, steps, row_tiles, planned, begins, most, total, tiles, starts):
    """(tiles, starts) of groups that have other lengths now, by one block of threads.

    planned, begins : tiles and starts as they were; they stay if that is even
    most, total : scratch in shared memory, a number for each thread, a power of 2
    """
    t, threads, places = cuda.threadIdx.x, cuda.blockDim.x, begins.size - 1
    most[t] = total[t] = uint32(0)
    for unit in range(t, places, threads):
        own = uint32(0)
        for i in range(begins[unit], begins[unit + 1]):
            own = uint32(own + uint32(steps[planned[i, 0]] + TILE_STEPS))
        most[t], total[t] = max(most[t], own), uint32(total[t] + own)
    half = threads // 2
    while half:
        cuda.syncthreads()
        if t < half:
            most[t], total[t] = max(most[t], most[t + half]), uint32(total[t] + total[t + half])
        half //= 2
    cuda.syncthreads()
    if most[0] * places <= UNEVEN * total[0]:
        for i in range(t, planned.shape[0], threads):
            own = planned[i, 0]
            tiles[i, 0], tiles[i, 1] = own, planned[i, 1]
            tiles[i, 2], tiles[i, 3] = firsts[own], firsts[own] + steps[own]
        for unit in range(t, places + 1, threads):
            starts[unit] = begins[unit]
    else:
        for group in range(t // 32, steps.size, threads // 32):
            deal_in_turns(group, firsts, steps, row_tiles, places, tiles, starts)
