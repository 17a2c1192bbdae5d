"""Gates: a number for each block of a block-sparse matrix, and what of it is left to multiply.

Blocks whose gate is zero are left out: a smaller layout, made once for each set of them. Under a
capture, where their numbers are known only if the host looked at them before and nothing writes to
them, and in a layout that `on_device` made, they stay, as zeros. A kernel that takes gates reads w
as it is, and may skip them; for others the gated blocks are computed first.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from numbsparse import edits, kernels
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import (
    DeviceArray,
    empty,
    is_capturing,
    is_of_a_graph,
    is_own,
    outside_capture,
    to_device,
)
from numbsparse.dtypes import type_name
from numbsparse.kernels.parts.plans import Sent
from numbsparse.layout import Index, Layout, cached
from numbsparse.ops.embedding import take_rows
from numbsparse.ops.index import index_beside
from numbsparse.ops.made import MadeLayout, clear_rest
from numbsparse.ops.operands import operand, state_dtype
from numbsparse.ops.shape import reshape

MOST_SELECTIONS = 16  # of each layout that are remembered: layers of one shape have one each


class Selection(NamedTuple):
    """The blocks of a layout whose gate is not zero."""

    layout: Layout
    full: Layout
    chosen: Any  # where in `full` each block is, int32; None: all, in order
    found: Any  # where in `layout` each block of `full` is, int32, -1 where it is not
    gates: Any
    places: Places | None = None  # on a GPU, if blocks are left out
    is_known: bool = True  # whether the host knows which are zero
    ones: bool = False  # whether it knows that all that are left are one
    in_place: bool = False  # whether `sddmm` may leave sums where w has them, others open

    @property
    def is_all(self) -> bool:
        """Whether the gated blocks are those of w themselves, as far as the host knows."""
        return self.ones and self.layout is self.full

    def index_beside(self, array: Any) -> Index:
        """Of the layout, with blocks named by where they are in `full`."""
        return index_beside(self.full, array) if self.places is None else self.places.index


class Places:
    """Where the chosen blocks of a layout are, for kernels that read all of w, or write it."""

    def __init__(self, layout: Layout, chosen: np.ndarray):
        self.layout, self._chosen = layout, chosen

    @cached
    def index(self) -> Index:
        own, chosen = self.layout.index, self._chosen
        rows = own.rows._replace(blocks=chosen)  # which were numbered row by row
        columns = own.columns._replace(blocks=chosen[own.columns.blocks])
        return Sent(Index(rows, columns, own.block_rows, own.block_columns))


class Known(NamedTuple):
    """What the host knows of gates."""

    mask: np.ndarray  # which are not zero
    ones: bool  # whether all these are one
    key: bytes | None  # stands for the mask; None if none is zero
    settled: edits.Settled | None = None  # who captures what is made of them


def kept_of(w: BlockSparse, gate: Any) -> Selection | None:
    """What a gate leaves of w, in the order in which that is stored; None if all gates are one."""
    if isinstance(gate, Selection):
        return gate
    numbers, made = gate_numbers(w, gate), isinstance(w.stored_layout, MadeLayout)
    if w.is_transposed and isinstance(gate, BlockSparse):
        numbers = gate_numbers(w.T, gate.T)
    elif w.is_transposed and not made:
        numbers = in_order(numbers, w.layout)
    kept = select_gated(w, numbers)
    return None if kept.is_all else kept


def gate_numbers(w: BlockSparse, gate: Any) -> Any:
    """A gate as (n_blocks,) numbers in the order of `w.data`, when it fits w; no copy.

    A BlockSparse takes 1 x 1 blocks in the layout of w. In a layout that `on_device` made the order
    is that of `w.values`.
    """
    if isinstance(gate, BlockSparse):
        if gate.block_size != 1 or gate.layout != w.layout:
            raise ValueError(
                f"gate takes blocks of 1 x 1 in the layout of w, {w.layout}, got {gate!r}"
            )
        numbers = reshape(gate.values, (gate.n_blocks,))
        if gate.is_transposed:
            numbers = in_order(numbers, gate.stored_layout)
    else:
        numbers = operand(gate, "gate")
    if numbers.shape != (w.n_blocks,):
        raise ValueError(
            f"gate takes the shape ({w.n_blocks},), a number for each block of w, "
            f"got {numbers.shape}"
        )
    wide = state_dtype(w.dtype)
    if numbers.dtype != wide:
        raise TypeError(f"gate takes {wide} with a w of {w.dtype}, got {numbers.dtype}")
    if isinstance(numbers, DeviceArray) != (w.place == "cuda"):
        raise ValueError(
            f"gate takes the device of w, {w.place}, got a {type_name(gate)} on the other"
        )
    return numbers


def in_order(numbers: Any, layout: Layout) -> Any:
    """A number for each block of a layout, in the order that the transposed one stores them."""
    order = index_beside(layout, numbers).columns.blocks
    return reshape(take_rows(reshape(numbers, (-1, 1)), order), (-1,))


def select_gated(w: BlockSparse, gates: Any) -> Selection:
    """What `gates`, numbers as stored, leave of w."""
    known = _known_of(w, gates)
    full, on_gpu = w.stored_layout, isinstance(gates, DeviceArray)
    if known is None or known.key is None:
        ones = known is not None and known.ones
        return all_blocks(w, gates)._replace(is_known=known is not None, ones=ones)
    made = _selections.setdefault(full, {})
    mask, key = known.mask, (on_gpu and gates.device_id, on_gpu, known.key)
    found = made.pop(key, None)
    if found is None:
        chosen = np.flatnonzero(mask).astype(np.int32)
        back = np.where(mask, np.cumsum(mask) - 1, -1).astype(np.int32)
        layout = full.select(mask)
        found = layout, chosen, back, None
        if on_gpu:
            with outside_capture():
                found = layout, to_device(chosen), to_device(back), Places(layout, chosen)
        while len(made) >= MOST_SELECTIONS:
            del made[next(iter(made))]
    made[key] = found  # the last one used is the last to go
    if known.settled is not None:
        known.settled.keep(found)
    layout, chosen, back, places = found
    return Selection(layout, full, chosen, back, gates, places, ones=known.ones)


def all_blocks(w: BlockSparse, gates: Any) -> Selection:
    """All of w, whatever the gates are."""
    return all_of(w.stored_layout, gates)


def all_of(full: Layout, gates: Any) -> Selection:
    if not isinstance(gates, DeviceArray):
        return Selection(full, full, None, None, gates)
    everything = index_beside(full, gates).rows.blocks  # 0, 1, 2, ...
    return Selection(full, full, everything, everything, gates, None, False)


_selections: WeakKeyDictionary[Layout, dict[Any, Any]] = WeakKeyDictionary()


def _known_of(w: BlockSparse, gates: Any) -> Known | None:
    """None where the host is not to look at them."""
    if isinstance(w.stored_layout, MadeLayout):
        return None
    return _known_before(gates) if is_capturing() else _known(gates)


def _known(gates: Any) -> Known:
    """Of gates on a GPU copied to the host once, while nothing here writes to them."""
    if not isinstance(gates, DeviceArray):
        return _seen(gates)
    found = _seen_before(gates)
    if found is None:
        found = _seen(gates.numpy())
        if is_own(gates):
            _seen_of[gates.owner] = _state(gates), found
    return found


def _known_before(gates: Any) -> Known | None:
    """In a captured step what is known of gates that settled before it."""
    settled = edits.settling()
    if settled is None or not is_own(gates) or is_of_a_graph(gates):
        return None
    found = _seen_before(gates)
    if found is None:
        settled.wait_for(gates)
    return found._replace(settled=settled) if found and settled.take(gates) else None


def _seen_before(gates: DeviceArray) -> Known | None:
    """What the host saw of gates that nothing wrote to since; None of what others have."""
    state, known = _seen_of.get(gates.owner, (None, None)) if is_own(gates) else (None, None)
    return known if state == _state(gates) else None


def _state(gates: DeviceArray) -> Any:
    edit = edits.last_of(gates)
    return gates.address, gates.shape, gates.strides, None if edit is None else edit.serial


def _seen(numbers: np.ndarray) -> Known:
    mask = numbers != 0
    key = None if mask.all() else np.packbits(mask).tobytes()
    return Known(mask, bool((numbers[mask] == 1).all()), key)


_seen_of: WeakKeyDictionary[Any, tuple[Any, Known]] = WeakKeyDictionary()


def gated(w: BlockSparse, by: Any, kept: Selection) -> BlockSparse:
    """by[b] * w.data[b] of the blocks that are kept, in their layout."""
    layout = kept.layout
    if isinstance(by, DeviceArray):
        values = _scaled_on_gpu(w.values, kept.chosen, by, kept, False, layout.n_blocks)
    elif kept.chosen is None:
        values = _scaled(w.values, by)
        values[kept.gates == 0] = 0
    else:
        values = _scaled(w.values[kept.chosen], by[kept.chosen], own=True)
    return BlockSparse(values, layout, shape=w.shape)


def ungated(v: BlockSparse, by: Any, kept: Selection, in_place: bool = False) -> BlockSparse:
    """by[b] * v.data[b] of the blocks that were kept, zeros in the others, in the full layout.

    in_place : whether v is not needed any more, and `by` are the gates themselves
    """
    if in_place and kept.is_all:
        return v
    if isinstance(by, DeviceArray) and in_place and kept.layout is kept.full:
        values = v.values
        if values.size:
            kernels.gates.scale_blocks(values, kept.found, by, kept.gates, 1, values)
    elif isinstance(by, DeviceArray):
        values = _scaled_on_gpu(v.values, kept.found, by, kept, True, kept.full.n_blocks)
    elif kept.chosen is None:
        values = _scaled(v.values, by)
        values[kept.gates == 0] = 0
    else:
        values = np.zeros((kept.full.n_blocks, *v.values.shape[1:]), v.dtype)
        values[kept.chosen] = _scaled(v.values, by[kept.chosen])
    clear_rest(kept.full, values)  # a gate there may be NaN, and a gradient is zero
    return BlockSparse(values, kept.full, shape=v.shape)


def block_dots(a: Any, b: Any, kept: Selection) -> Any:
    """sum(a * b) of each block, (n_blocks,): a of those that are kept, b of all; 0 of the others.

    Both are stored blocks, with zeros beyond the edge of their matrices.
    """
    if isinstance(b, DeviceArray):
        dots: Any = empty((b.shape[0],), np.float32)
        if b.shape[0]:
            kernels.gates.block_dots(a, b, kept.found, kept.gates, dots)
        return dots
    wide = state_dtype(b.dtype)
    dots = np.zeros(b.shape[0], wide)
    chosen = slice(None) if kept.chosen is None else kept.chosen
    rows = (x.astype(wide, copy=False) for x in (a, b[chosen]))
    dots[chosen] = np.einsum("nij,nij->n", *rows)
    dots[kept.gates == 0] = 0
    return dots


def _scaled(values: np.ndarray, by: np.ndarray, own: bool = False) -> np.ndarray:
    """by[b] * values[b], rounded once; in `values` itself if nobody else has it."""
    if values.dtype.itemsize == 2:
        return (values.astype(np.float32) * by[:, None, None]).astype(values.dtype)
    return np.multiply(values, by[:, None, None], out=values if own else None)


def _scaled_on_gpu(a: Any, where: Any, by: Any, kept: Selection, to_all: bool, n: int) -> Any:
    out = empty((n, *a.shape[1:]), a.dtype)
    if n:
        kernels.gates.scale_blocks(a, where, by, kept.gates, int(to_all), out)
    return out
