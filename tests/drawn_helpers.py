"""Arrays of any number of axes in every order of memory, and how calls on them are drawn.

Hypothesis draws the first of each strategy first, so that is never a trivial one here.
"""

from math import prod

import numpy as np
from hypothesis import strategies as st

from numbsparse import ops
from numbsparse.device import DeviceArray, to_device


def _along(axis):
    """Every second item of an axis, NaN between them."""

    def step(array, put):
        wide = np.full([2 * n if i == axis else n for i, n in enumerate(array.shape)], np.nan)
        key = (slice(None),) * axis + (slice(None, None, 2),)
        wide[key] = array
        return put(wide)[key]

    return step


def _offset(array, put):
    longer = np.append(np.nan, array)
    return put(longer)[1:].reshape(array.shape)


def _unaligned(array, put):
    values = put(array)
    room = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    room[...] = values
    return room


def _field(array, put):
    values = put(array)
    records = np.zeros(values.shape, [("other", np.uint8), ("values", values.dtype)])
    records["values"] = values
    return records["values"]


def _read_only(array, put):
    values = put(array)
    values.flags.writeable = False
    return values


def _rotated(array, put):
    return ops.transpose(put(np.moveaxis(array, 0, -1)), (array.ndim - 1, *range(array.ndim - 1)))


FORMS = {  # name: (least axes, also on a GPU, how the array is put there)
    "C": (0, True, lambda array, put: put(array)),
    "F": (0, True, lambda array, put: put(array.T).T),
    "rotated": (2, True, _rotated),
    "step 2": (1, True, lambda array, put: _along(array.ndim - 1)(array, put)),
    "step 2 of rows": (2, True, _along(0)),
    "offset": (0, True, _offset),
    "reversed": (1, False, lambda array, put: put(array[..., ::-1])[..., ::-1]),
    "reversed rows": (2, False, lambda array, put: put(array[::-1])[::-1]),
    "repeated": (1, False, lambda array, put: np.broadcast_to(put(array[:1]), array.shape)),
    "read-only": (0, False, _read_only),
    "unaligned": (0, False, _unaligned),
    "field": (0, False, _field),
}


def laid(form, array, dtype, place):
    """A float64 array in a dtype, a place and an order of memory; where that cannot be, in C."""
    least, on_gpu, make = FORMS[form]

    def put(values):
        values = np.array(values, dtype, order="C")
        return to_device(values) if place == "cuda" else values

    if array.ndim < least or array.size == 0 or (place == "cuda" and not on_gpu):
        return put(array)
    there = make(array, put)
    assert there.shape == array.shape
    return there


def values(array):
    """What an array of any place holds, in float64."""
    host = array.numpy() if isinstance(array, DeviceArray) else array
    return np.array(host, np.float64)


forms = st.sampled_from(list(FORMS))
seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from(
    [(2, 3, 5), (3, 4), (33, 2), (7,), (2, 1, 3, 2), (33,), (1, 5), (5, 1), (), (1,), (0,),
     (1, 1, 1), (3, 0), (0, 2), (2, 0, 3)]
)  # fmt: skip
widths = st.sampled_from([5, 8, 33, 3, 2, 1])
outer = st.sampled_from([(2, 3), (5,), (1,), (), (1, 1), (0,), (3, 0)])
yes = st.sampled_from([True, False])


@st.composite
def broadcasting(draw):
    """Two shapes that broadcast together."""
    shape = draw(shapes)
    starts = draw(st.sampled_from([(0, 1), (0, 0), (1, 0), (1, 1)]))
    return tuple(
        tuple(draw(st.sampled_from([n, n, n, 1])) for n in shape)[start:] for start in starts
    )


@st.composite
def axes_of(draw, shape):
    """None, an axis or several of a shape, counted from either end."""
    n = len(shape)
    kind = draw(st.sampled_from(["one", "several", "all", "none"])) if n else "none"
    if kind == "one":
        return draw(st.integers(0, n - 1)) - n * draw(st.integers(0, 1))
    if kind == "several":
        several = draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=n))
        return tuple(a - n * draw(st.integers(0, 1)) for a in several)
    return None if kind == "all" else draw(st.sampled_from([None, ()]))


@st.composite
def keys_of(draw, shape):
    """Integers, slices, `...` and None that a shape takes as an index."""
    key = []
    for n in shape:
        kind = draw(st.sampled_from(["slice", "number", "whole", "end"]))
        if kind == "slice":
            ends = st.none() | st.integers(-n - 1, n + 1)
            key.append(slice(draw(ends), draw(ends), draw(st.sampled_from([2, 1, 3]))))
        elif kind == "number" and n:
            key.append(draw(st.integers(-n, n - 1)))
        elif kind == "whole":
            key.append(slice(None))
        else:
            break
    if draw(st.booleans()):
        key.insert(draw(st.integers(0, len(key))), None)
    return (*key, ...) if draw(st.booleans()) else tuple(key)


@st.composite
def reshapes_of(draw, shape):
    """A shape of as many values, maybe with a -1."""
    n, sizes = prod(shape), []
    while n > 1 and draw(yes):
        factor = draw(st.sampled_from([*(d for d in range(2, n + 1) if n % d == 0), 1]))
        sizes.append(factor)
        n //= factor
    sizes = draw(st.permutations([*sizes, n]))
    if 0 not in sizes and draw(st.booleans()):
        sizes[draw(st.integers(0, len(sizes) - 1))] = -1
    return tuple(sizes)
