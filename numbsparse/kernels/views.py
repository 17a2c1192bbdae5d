"""Strided views as kernels walk them: few axes, strides in items."""

from collections.abc import Sequence
from math import prod
from typing import Any

from numbsparse.device.array import DeviceArray

MOST_WALKS = 4096  # remembered


def view_of(x: DeviceArray) -> tuple[int, ...]:
    """(rows, columns, strides in items)."""
    return (*x.shape, *(stride // x.itemsize for stride in x.strides))


def strides_within(a: DeviceArray, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of `a` broadcast to `shape`, in items: 0 along the axes that repeat."""
    extra = len(shape) - len(a.shape)
    own = (0 if n == 1 else s // a.itemsize for n, s in zip(a.shape, a.strides, strict=True))
    return (0,) * extra + tuple(own)


def walk(
    shape: tuple[int, ...], *arrays: DeviceArray
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """How to go through arrays broadcast to `shape`: (axes, the strides of each array in items)."""
    for a in arrays:
        if not a.is_contiguous or a.shape != shape:
            break
    else:
        return (prod(shape),), [(1,)] * len(arrays)
    key = (shape, *((a.shape, a.strides, a.itemsize) for a in arrays))
    if key not in _walks:
        if len(_walks) > MOST_WALKS:
            _walks.clear()
        _walks[key] = collapse(shape, *(strides_within(a, shape) for a in arrays))
    return _walks[key]


_walks: dict[Any, tuple[tuple[int, ...], list[tuple[int, ...]]]] = {}


def collapse(
    shape: Sequence[int], *strides: Sequence[int]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The same walk with as few axes as possible, at least one.

    An axis joins the next one where every operand steps over it as over more of the next.
    """
    lengths: list[int] = []
    steps: list[tuple[int, ...]] = []  # per axis, that of each operand
    for n, step in zip(shape, zip(*strides, strict=True), strict=True):
        if n == 1:
            continue
        if lengths and all(o == s * n for o, s in zip(steps[-1], step, strict=True)):
            lengths[-1] *= n
            steps[-1] = step
        else:
            lengths.append(n)
            steps.append(step)
    if not lengths:
        return (1,), [(0,) for _ in strides]
    return tuple(lengths), [tuple(of) for of in zip(*steps, strict=True)]
