"""Which lines of a layout are computed together: those with blocks at the same inputs."""

import numpy as np
from numba import types
from numba.extending import intrinsic

from numbsparse.kernels.cores import compiled
from numbsparse.layout import Index, Walk

MATCHED = 4096  # lines: more of them are grouped in their order


def grouped(walk: Walk, n_inputs: int, size: int) -> np.ndarray:
    """(groups, size) int32: lines that share many inputs, -1 for none.

    Pairs with the largest overlap are matched, then pairs of pairs; or they are neighbours, where
    these have as much in common, as in a band. Of neighbours alone k6 took 1.04 to 1.10 times as
    long with 8,192 features, 0.93 with 4,096 at density 0.3 (H200).
    """
    n_lines = len(walk.indptr) - 1
    groups = np.arange(n_lines, dtype=np.int64)[:, None]
    neighbours = np.append(groups, np.full(-n_lines % size, -1)).reshape(-1, size).astype(np.int32)
    if size == 1 or n_lines > MATCHED:
        return neighbours
    kept = np.zeros((n_lines + 1, -(-n_inputs // 64) * 64), bool)  # the last one of line -1: none
    kept[np.repeat(np.arange(n_lines), np.diff(walk.indptr)), walk.indices] = True
    own = np.packbits(kept, axis=1, bitorder="little").view(np.uint64)
    meets = own[:-1]
    while groups.shape[1] < size:
        if len(groups) % 2:
            groups = np.vstack([groups, np.full((1, groups.shape[1]), -1)])
            meets = np.vstack([meets, own[-1:]])
        pairs, left = np.empty((len(groups) // 2, 2), np.int64), np.ones(len(groups), bool)
        _match(meets, np.argsort(-_count(meets), kind="stable"), left, pairs)
        groups = np.hstack([groups[pairs[:, 0]], groups[pairs[:, 1]]])
        meets = meets[pairs[:, 0]] | meets[pairs[:, 1]]
    beside = np.bitwise_or.reduce(own[neighbours], axis=1)
    matched = _count(meets).sum() < _count(beside).sum()
    return groups.astype(np.int32) if matched else neighbours


@intrinsic
def bits_set(typing, word):
    """How many bits of a uint64 are 1, as int64."""

    def build(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.uint64), build


@compiled()
def bit_of(number):
    return np.uint64(1) << np.uint64(number)


@compiled()
def lowest_of(word):
    """(the number of the lowest bit that is set, the word without it)."""
    rest = word & (word - np.uint64(1))
    return bits_set((word ^ rest) - np.uint64(1)), rest


def _count(meets: np.ndarray) -> np.ndarray:
    """The inputs of each line."""
    return np.bitwise_count(meets).sum(1, dtype=np.int64)


@compiled()
def _match(meets, order, left, pairs):
    """Match every line with the one of those left that shares most inputs with it."""
    (n, words), pair = meets.shape, 0
    for k in range(n):
        line = order[k]
        if left[line]:
            left[line] = False
            most, other = -1, -1
            for of in range(n):
                if left[of]:
                    shared = 0
                    for w in range(words):
                        shared += bits_set(meets[line, w] & meets[of, w])
                    if shared > most:
                        most, other = shared, of
            left[other] = False
            pairs[pair, 0], pairs[pair, 1] = line, other
            pair += 1


@compiled()
def write_shares(record, kept, counts, before, inputs):
    """What a record says of its step's kept blocks: a mask for each share, how many inputs they
    meet, and 256 times how many they are, and last the blocks.

    kept (SHARES, BLOCKS, 2) : of each block its share's bit and what names it, of `counts` blocks
    a share, which are 0 after; a mask has the number of blocks in the shares before it from the bit
    `before` on.
    """
    slot, first = 0, record.size - kept.shape[1]  # of the blocks
    for share in range(counts.size):
        mask = slot << before
        for k in range(counts[share]):
            mask |= kept[share, k, 0]
            record[first + slot] = kept[share, k, 1]
            slot += 1
        record[share], counts[share] = mask, 0
    record[counts.size] = inputs + 256 * slot


def counted(walk: Walk, lines: np.ndarray, n_groups: int, shift: int) -> np.ndarray:
    """(strips, groups, columns) uint8: the blocks of each line in groups of 1 << shift inputs.

    lines (strips, columns) : which they are; none beyond the last one
    """
    counts = np.zeros((len(lines), n_groups, lines.shape[1]), np.uint8)
    _count_blocks(walk.indptr, walk.indices, lines, shift, counts)
    return counts


@compiled()
def _count_blocks(indptr, indices, lines, shift, counts):
    for strip in range(len(lines)):
        for column in range(lines.shape[1]):
            line = lines[strip, column]
            if line < indptr.size - 1:
                for k in range(indptr[line], indptr[line + 1]):
                    counts[strip, indices[k] >> shift, column] += 1


def steps_in_strips(
    index: Index, B: int, transposed: bool, width: int, group_width: int, blocks_a_step: int
) -> tuple[float, float, int]:
    """Of the groups that strips of `width` columns need: the part of their blocks that is kept, and
    the steps of a group, on average if all are full, and at most."""
    walk, columns = index.rows if transposed else index.columns, width // B
    n_groups = int(walk.indices.max(initial=0)) * B // group_width + 1
    lines = np.arange(-(-(walk.indptr.size - 1) // columns) * columns).reshape(-1, columns)
    counts = counted(walk, lines, n_groups, (group_width // B).bit_length() - 1)
    shift, kept = blocks_a_step - 1, walk.indices.size  # a step is of one or two blocks
    steps = (counts + shift >> shift).sum(2, dtype=np.int64)
    needed = max(int(np.count_nonzero(steps)), 1)
    part = kept / (needed * columns * (group_width // B))
    return part, kept / blocks_a_step / needed, int(steps.max(initial=1))
