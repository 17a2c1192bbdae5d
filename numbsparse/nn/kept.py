"""Arrays kept with parameters (moments, masters, averages), and the layout they belong to."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from numbsparse import ops
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, forget_captures, moved, outside_capture
from numbsparse.dtypes import check_kind, refuse_masked, type_name
from numbsparse.layout import Layout
from numbsparse.ops import operands


class Form(NamedTuple):
    """How values are stored: what is kept with them is stored the same way."""

    shape: tuple[int, ...]  # of the array of values
    features: Any = ()  # in and out, of a matrix
    layout: Layout | None = None
    is_transposed: bool = False

    def matrix(self, values: Any) -> BlockSparse:
        """A block-sparse matrix of this form."""
        assert self.layout is not None
        if self.is_transposed:
            return BlockSparse(values, self.layout, shape=self.features[::-1]).T
        return BlockSparse(values, self.layout, shape=self.features)

    @property
    def matrix_layout(self) -> Layout:
        assert self.layout is not None
        return self.layout.T if self.is_transposed else self.layout

    def __str__(self) -> str:
        if self.layout is None:
            return f"an array of {self.shape}"
        size, seen = self.shape[-1], " transposed" * self.is_transposed
        return f"{self.features[0]} x {self.features[1]} in blocks of {size}, {self.layout}{seen}"


def against(own: Form, other: Form) -> str:
    """ "own, where it is other", in words that tell one from the other."""
    words = f"{own}, where it is {other}"
    if None in (own.layout, other.layout) or str(own) != str(other):
        return words
    one, two = own.matrix_layout, other.matrix_layout
    first = np.setxor1d(one.flat_indices, two.flat_indices)[0]
    block = tuple(int(n) for n in divmod(first, one.shape[1]))
    which = "this" if first in one.flat_indices else "that"
    return f"{words}: of the two only {which} one has block {block}"


def form_of(data: Any) -> Form:
    """Of what a Tensor holds."""
    if isinstance(data, BlockSparse):
        return Form(data.values.shape, data.shape, data.stored_layout, data.is_transposed)
    return Form(data.shape)


def look_of(data: Any) -> tuple[Any, ...]:
    """All that is asked of data before memory beside it, or it itself, is written."""
    values = data.values if isinstance(data, BlockSparse) else data
    order = values.is_contiguous if isinstance(values, DeviceArray) else values.flags.num
    return form_of(data), type(values), values.dtype, values.device, order


def check_form(name: str, form: Form, own: Form, beside: str, so: str = "") -> None:
    """Refuse, as `name`, what is stored in another way than what it belongs to."""
    if form != own:
        raise ValueError(f"{name} has another layout than {beside} ({against(form, own)}){so}")


class naming:
    """Within this context errors that name an argument say first where it is."""

    def __init__(self, where: str):
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, TypeError | ValueError):
            error.args = (f"{self._where}: {error.args[0]}",)


def like(values: Any) -> Any:
    """Zeros to keep with these values, in float32 at least."""
    return ops.zeros(values.shape, ops.state_dtype(values.dtype), values.device)


def in_place_of(array: Any, device: str) -> Any:
    """The array on that device; what was captured with it where it was is stale."""
    if array.device == device:
        return array
    with outside_capture():
        array = moved(array, device)
    forget_captures()
    return array


def on_cpu(data: Any) -> Any:
    """An array, or a BlockSparse, on the CPU in memory of its own."""
    host = moved(data, "cpu")
    return host.copy() if host is data else host


def remapped(array: Any, old: Form, new: Form, fresh: Any = None) -> Any:
    """The kept array in the order of another layout: blocks in both go on, others are `fresh`.

    Zeros without `fresh`. `old` and `new` differ only in their layout, and in whether the matrix is
    a transposed view.
    """
    fresh = None if fresh is None else moved(fresh, array.device)
    if old.layout is not None and new.layout is not None and old.is_transposed == new.is_transposed:
        return ops.in_layout(array, new.layout, old.layout, fresh)
    wanted = None if fresh is None else new.matrix(fresh)
    mapped = ops.remap(old.matrix(array), new.matrix_layout, wanted)
    return mapped.stored_as(new.matrix(mapped.values), "array").values


def saved(array: Any, form: Form) -> Any:
    """For a state dict: an array, or a BlockSparse, which says its layout."""
    host = on_cpu(array)
    return host if form.layout is None else form.matrix(host)


def check_state(state: Any, argument: str = "state") -> None:
    """Refuse what is no dict."""
    check_kind(argument, state, Mapping, "what state_dict() gave")


def check_keys(argument: str, state: Any, names: Collection[str]) -> None:
    """Refuse all but a dict of these keys."""
    if not isinstance(state, Mapping) or set(names) != set(state):
        got = list(state) if isinstance(state, Mapping) else type_name(state)
        raise ValueError(f"{argument} takes {', '.join(names)}, got {got}")


def as_array(value: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An array without axes, which a file gives back as a number, is an array again."""
    if shape or not isinstance(value, bool | int | float):
        return value
    array = np.asarray(value, dtype)
    return array if array == value or value != value else np.asarray(value)


def loaded(name: str, value: Any, data: Any, dtype: Any = None, so: str = "") -> Any:
    """An array of a state dict as it is kept with `data`; of the dtype that state has, or this one.

    Raises ValueError, which calls it by `name`, for another kind, layout, shape or dtype; `so` is
    what to do about a layout.
    """
    refuse_masked(value, name)
    shape, dtype = form_of(data).shape, dtype or ops.state_dtype(data.dtype)
    value, takes_matrix = as_array(value, shape, dtype), isinstance(data, BlockSparse)
    if not isinstance(value, BlockSparse if takes_matrix else np.ndarray):
        takes = "a BlockSparse" if takes_matrix else "an array"
        raise ValueError(f"{name} takes {takes}, got {type_name(value)}")
    if isinstance(value, BlockSparse):
        if data.layout != value.layout:
            check_form(name, form_of(value), form_of(data), "its parameter", so)
        value = value.to("cpu").stored_as(data, name).values
    operands.check_form(name, value, shape, dtype)
    return value.copy() if data.device == "cpu" else moved(value, data.device)


def check_can_remap(name: str, old: Form, new: Form) -> None:
    """Refuse all but another layout of the same blocks."""
    if (
        old.layout is None
        or new.layout is None
        or ((old.features, old.shape[1:]) != (new.features, new.shape[1:]))
    ):
        raise ValueError(
            f"{name} takes a layout of the same features and block size: {old}, got {new}"
        )
