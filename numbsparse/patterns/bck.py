"""openai/blocksparse's convolution blocks, as a pattern over blocks of equal size."""

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from numbsparse.patterns.checks import BLOCK_SIZES, INTEGER, Pattern, integer


class FromBck(NamedTuple):
    """What `from_bck` found.

    The weight with this pattern takes `x[..., in_order]`, and its result `y` has out-channel
    `out_order[k]` at k: `y[..., np.argsort(out_order)]` is in the order of the lists.
    """

    pattern: Pattern  # (in_blocks, out_blocks)
    in_order: np.ndarray  # (in_channels,) int64
    out_order: np.ndarray  # (out_channels,) int64
    block_size: int


def from_bck(
    bck: Iterable[tuple[Iterable[int], Iterable[int]]],
    in_channels: int,
    out_channels: int,
    *,
    block_size: int | None = None,
) -> FromBck:
    """The blocks of openai/blocksparse's `BlocksparseConv` as orders of channels and a pattern.

    `bck` has a pair of lists of channel numbers for each block, (in-channels, out-channels): every
    channel of the first is joined to every channel of the second. Lists may be of any length and
    order, overlap, and leave gaps.

    Channels that are in the same lists are one group. Groups are put together, so that blocks of
    `block_size` channels have them whole: this is possible exactly where the size of each group is
    a multiple of it. Channels in no list come last, and may be of any number. Two blocks may join
    the same two channels: they are joined once, where openai/blocksparse added two filters up.

    Parameters
    ----------
    bck : sequence of pairs of sequences (or sets) of int
    in_channels, out_channels : int
    block_size : int, optional
        Default: the largest of 128, 64, 32, 16, 8 and 4 that divides all groups.

    Returns
    -------
    FromBck : pattern (in_blocks, out_blocks), in_order, out_order, block_size

    Raises
    ------
    TypeError
        If `bck` holds no pairs of lists, or channels are not whole numbers.
    ValueError
        If a channel is out of range or twice in a list, a list is empty, or a group is not whole
        blocks: the message names the block or the group.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> even, odd = range(0, 16, 2), range(1, 16, 2)
    >>> found = ns.patterns.from_bck([(even, range(8)), (odd, range(16))], 16, 16)
    >>> found.block_size, found.in_order[:8]
    (8, array([ 0,  2,  4,  6,  8, 10, 12, 14]))
    >>> found.pattern.astype(int)
    array([[1, 0],
           [1, 1]])
    """
    in_channels = integer("in_channels", in_channels)
    out_channels = integer("out_channels", out_channels)
    in_lists, out_lists = [], []
    if not isinstance(bck, Iterable):
        raise TypeError(f"bck takes a sequence of pairs of lists of channels, got {bck!r}")
    for b, pair in enumerate(bck):
        if not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
            raise TypeError(f"bck[{b}] takes a pair of lists of channels, got {pair!r}")
        in_lists.append(_channels(f"bck[{b}][0]", pair[0], in_channels))
        out_lists.append(_channels(f"bck[{b}][1]", pair[1], out_channels))
    if not in_lists:
        raise ValueError("bck takes at least one block, got none")
    in_order, in_groups = _grouped(in_lists, in_channels)
    out_order, out_groups = _grouped(out_lists, out_channels)
    sizes = [size for _, size in in_groups + out_groups]
    block_size = _block_size(sizes) if block_size is None else integer("block_size", block_size)
    for side, groups in (("in", in_groups), ("out", out_groups)):
        for first, size in groups:
            if size % block_size:
                raise ValueError(
                    f"bck has a group of {size} {side}-channels that are in the same lists, that "
                    f"of channel {first}: not a multiple of blocks of {block_size}"
                )
    pattern = np.zeros((-(-in_channels // block_size), -(-out_channels // block_size)), bool)
    in_place, out_place = np.argsort(in_order), np.argsort(out_order)
    for c, k in zip(in_lists, out_lists, strict=True):
        pattern[
            np.ix_(np.unique(in_place[c] // block_size), np.unique(out_place[k] // block_size))
        ] = True
    return FromBck(pattern, in_order, out_order, block_size)


def _channels(argument: str, channels: Any, count: int) -> np.ndarray:
    if not isinstance(channels, Iterable):
        raise TypeError(f"{argument} takes a list of channels, got {channels!r}")
    numbers = list(channels)
    for n in numbers:
        if isinstance(n, bool) or not isinstance(n, INTEGER):
            raise TypeError(f"{argument} takes whole numbers, got {n!r}")
        if not 0 <= n < count:
            raise ValueError(f"{argument} takes channels from 0 to {count - 1}, got {n}")
    if not numbers:
        raise ValueError(f"{argument} takes at least one channel, got none")
    array = np.array(numbers, np.int64)
    if np.unique(array).size != array.size:
        raise ValueError(f"{argument} takes each channel once, got {numbers}")
    return array


def _grouped(lists: list[np.ndarray], count: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The order of the channels, group by group; and each group's (first channel, size).

    Groups come in the order of their first channels; channels in no list last, as no group.
    """
    member = np.zeros((count, len(lists)), bool)
    for b, channels in enumerate(lists):
        member[channels, b] = True
    groups: dict[bytes, list[int]] = {}
    unused: list[int] = []
    for channel, row in enumerate(member):
        (groups.setdefault(row.tobytes(), []) if row.any() else unused).append(channel)
    order = [channel for group in groups.values() for channel in group] + unused
    return np.array(order, np.int64), [(group[0], len(group)) for group in groups.values()]


def _block_size(sizes: list[int]) -> int:
    common = gcd(*sizes)
    for size in reversed(BLOCK_SIZES):
        if common % size == 0:
            return size
    raise ValueError(
        f"bck has groups of {sorted(set(sizes))} channels that are in the same lists: "
        f"no block size of {BLOCK_SIZES} divides them all"
    )
