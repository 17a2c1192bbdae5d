"""Plans that a GPU makes: who computes what, and which lines and blocks are left.

`deal`'s schedules, for layouts made on a GPU: the host deals each piece to the place that is free
first. Here all pieces, longest first, are dealt round by round, every other round backwards, so
that the place with the longest of one round gets the shortest of the next. Each place then takes
its own by rows, so that all go down x together and its rows stay in the L2 cache. In the order of
their numbers products took up to 7 % longer, dealt row by row up to 14 % (H200).

Bits of words: a warp looks at 32 inputs of lines at a time, and goes from one kept to the next. Or
a block of threads has a list of entries, some of which are left. A warp marks 32 neighbours at
once, as the bits of a word; ranks, how many are left before each, are counts of bits. Those that
are left make groups anew, of up to `most`, one or two: ranks[0] are of what is left, and
ranks[most - 1] of what begins a group.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.kernels.ptx import (
    let_next_kernel_start,
    redux_or,
    shfl_idx,
    shfl_xor,
    wait_for_earlier_kernels,
)
from numbsparse.layout import Index


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


def longest_first(indptr: DeviceArray, parts: int) -> DeviceArray:
    """The numbers of all lines' parts, of which each has so many; those of longer lines first."""
    order = empty((max((indptr.size - 1) * parts, 1),), np.int32)
    launch(order_kernel, order.size, 32, indptr, parts, order)
    return order


@on_gpu_of(schedule)
def schedule_on_gpu(
    index: Index, lengths: LengthsOnGPU, row_tiles: int, units: int, *of_host: int
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


rank_of_group = ranking(steps_of)


@cuda.jit(device=True)
def length_of(lines, i):
    indptr, parts = lines
    return indptr[i // parts + 1] - indptr[i // parts]


rank_of_line = ranking(length_of)


@cuda.jit
def order_kernel(indptr, parts, order):
    """A warp for each."""
    i = cuda.blockIdx.x
    if i < (indptr.size - 1) * parts:
        order[rank_of_line(i, order.size, (indptr, parts))] = i


@cuda.jit
def tiles_kernel(firsts, steps, row_tiles, places, tiles, starts):
    group, lane, groups = cuda.blockIdx.x, cuda.threadIdx.x, steps.size
    let_next_kernel_start()
    wait_for_earlier_kernels()
    at, count = rank_of_group(group, groups, steps), row_tiles * groups
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


@cuda.jit(device=True)
def kept_by(words, line, lines, at):
    """(which of `lines` lines keep the input 32 at + lane: bit i for line + i; which of these 32
    inputs any of them keeps).

    `lines` is a literal: with a number known at run time alone, all inputs were taken for kept in
    the first launch of a process (H200).
    """
    mask, kept, lane = uint32(0), uint32(0), uint32(cuda.threadIdx.x) % uint32(32)
    for i in range(lines):
        if line + i < words.shape[0]:
            word = uint32(words[line + i, at])
            kept = uint32(kept | word)
            mask = uint32(mask | uint32(uint32(uint32(word >> lane) & uint32(1)) << uint32(i)))
    return mask, kept


@cuda.jit(device=True)
def next_kept(kept, masks):
    """(the first of the kept inputs, its mask, the others)."""
    bit = lowest(kept)
    return bit, shfl_idx(masks, uint32(bit)), uint32(kept & uint32(kept - uint32(1)))


@cuda.jit(device=True)
def lanes_where(is_so):
    """A bit for each lane of the warp in which it is so."""
    return redux_or(uint32(uint32(1 if is_so else 0) << uint32(cuda.threadIdx.x % 32)))


@cuda.jit(device=True)
def highest(word):
    """The number of the highest bit of a word that is set, or 0."""
    for shift in (1, 2, 4, 8, 16):
        word = uint32(word | word >> uint32(shift))
    return max(int32(cuda.popc(word)) - 1, 0)


@cuda.jit(device=True)
def lowest(word):
    """The number of the lowest bit of a word that is set."""
    return int32(cuda.popc(uint32(~word & uint32(word - uint32(1)))))


@cuda.jit(device=True)
def mark(masks, entry, is_left):
    """Bit entry % 32 of masks[entry // 32]; the lanes of a warp have neighbouring entries."""
    bits = redux_or(uint32(uint32(1 if is_left else 0) << uint32(entry % 32)))
    if entry % 32 == 0:
        masks[entry // 32] = bits


@cuda.jit(device=True)
def rank(masks, ranks, n):
    """ranks[i] = how many bits are set before entry i, i <= n; there is a mask beyond the last."""
    for entry in range(int32(cuda.threadIdx.x), n + 1, int32(cuda.blockDim.x)):
        whole = entry // 32
        total = bits_below(masks[whole], entry % 32)
        for word in range(whole):
            total += int32(cuda.popc(masks[word]))
        ranks[entry] = total


@cuda.jit(device=True)
def begins_group(ranks, firsts, line, entry, most):
    """Whether an entry is left and begins a group. Lines have groups of their own: before, those of
    this one began with group firsts[line]."""
    before = ranks[0, entry]
    if ranks[0, entry + 1] == before:
        return False
    return (before - ranks[0, firsts[line] * most]) % most == 0


@cuda.jit(device=True)
def group_of(ranks, entry, most):
    """(the group that has an entry that is left, where in it)"""
    before, after = ranks[most - 1, entry], ranks[most - 1, entry + 1]
    return after - 1, 1 - (after - before)
