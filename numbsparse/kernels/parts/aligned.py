"""Rows that `cp.async` and the copy engine can read: contiguous, from multiples of 16 bytes on."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.elementwise import copy, fill
from numbsparse.kernels.parts.straightened import straighten

BYTES, WORD = 16, 4  # of one copy, and of one that begins anywhere
LINE = 128  # of a cache line: where rows are longer, copies of them begin at one


def aligned_either_way(*arrays: DeviceArray) -> tuple[list[DeviceArray], list[bool]]:
    """Of one or two each x, or x.T where the batch is contiguous, or an aligned copy of it; and
    whether it is x.T."""
    across = [x.batch_is_contiguous for x in arrays]
    lines = (x.T if t else x for x, t in zip(arrays, across, strict=True))
    return aligned_together(*lines), across


def aligned(x: DeviceArray) -> DeviceArray:
    """x (rows, width), or a copy unless it is aligned."""
    return aligned_together(x)[0]


def aligned_together(*arrays: DeviceArray) -> list[DeviceArray]:
    """One or two arrays, each as it is or an aligned copy; two are copied by one launch."""
    found = [x if is_aligned(x) else _aligned_like(x) for x in arrays]
    copies = [(to, x) for to, x in zip(found, arrays, strict=True) if to is not x]
    if copies:
        copy_matrices(*copies)
    return found


def _aligned_like(x: DeviceArray) -> DeviceArray:
    rows, width = x.shape
    run = (LINE if width * x.itemsize > LINE else BYTES) // x.itemsize
    return empty((rows, -(-width // run) * run), x.dtype)[:, :width]


def copy_matrices(*copies: tuple[DeviceArray, DeviceArray]) -> None:
    """out[:] = x of one or two (out, x) of a dtype, where rows of `out` are aligned and have room
    for whole pieces of 16 bytes, the rest of which becomes 0."""
    copies = tuple((out, x) for out, x in copies if x.size)
    if all(x.strides[1] == x.itemsize for _, x in copies):
        straighten(*copies)
    else:
        for out, x in copies:
            copy(out, x)


def is_aligned(x: DeviceArray) -> bool:
    """Whether x (rows, width) can be read as it is; repeated rows, of stride 0, cannot."""
    rows, width = x.shape
    stride = x.strides[0] if rows > 1 else BYTES
    contiguous = width <= 1 or x.strides[1] == x.itemsize
    return contiguous and stride > 0 and x.address % BYTES == stride % BYTES == 0


def aligned_in_place(*arrays: DeviceArray) -> list[DeviceArray]:
    """Each x (rows, width), or a copy unless it or x.T is aligned; two are copied by one launch."""
    across = [not is_aligned(x) and (is_aligned(x.T) or x.batch_is_contiguous) for x in arrays]
    lines = aligned_together(*(x.T if t else x for x, t in zip(arrays, across, strict=True)))
    return [line.T if t else line for line, t in zip(lines, across, strict=True)]


def is_gapless(x: DeviceArray) -> bool:
    """Whether x.T has no gaps, and it and every eighth of its rows begin at 16 bytes."""
    return x.strides == (x.itemsize, x.shape[0] * x.itemsize) and x.address % BYTES == 0


def aligned_values(values: DeviceArray) -> DeviceArray:
    """Contiguous values, or a copy unless they begin at a multiple of 16 bytes."""
    if values.address % BYTES == 0:
        return values
    moved = empty(values.shape, values.dtype)
    copy(moved, values)
    return moved


def of_any_blocks(compute: Callable[..., None]) -> Callable[..., None]:
    """A decorator of y = x @ w, (x, values, index, y, ...): y is 0 where there is no block."""

    @wraps(compute)
    def product(x: Any, values: Any, index: Any, y: Any, *how: Any) -> None:
        if 0 in y.shape:
            return
        if values.shape[0] == 0:
            fill(y, 0)
        else:
            compute(x, values, index, y, *how)

    return product


def of_any_rows(compute: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of a weight-gradient, (x, dy, index, dvalues, ...): dvalues is 0 for no rows, and
    may begin anywhere. Where nothing is computed it returns True."""

    @wraps(compute)
    def weight_grad(x: Any, dy: Any, index: Any, dvalues: DeviceArray, *how: Any) -> Any:
        if dvalues.size == 0 or x.shape[0] == 0:
            fill(dvalues, 0)
            return True
        if dvalues.address % BYTES == 0:
            return compute(x, dy, index, dvalues, *how)
        moved = empty(dvalues.shape, dvalues.dtype)
        result = compute(x, dy, index, moved, *how)
        copy(dvalues, moved)
        return result

    return weight_grad


def of_bits(a: DeviceArray) -> DeviceArray:
    """16-bit values as uint16, which NumPy knows too."""
    return a.view("uint16") if a.itemsize == 2 else a
