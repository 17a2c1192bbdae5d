"""What functions of arrays are drawn from: inputs(draw, rng) gives float64 arrays, and the rest."""

import numpy as np
from drawn_helpers import axes_of, broadcasting, keys_of, outer, reshapes_of, shapes, widths
from hypothesis import strategies as st


def each(low, high, **others):
    """One array of any shape."""

    def inputs(draw, rng):
        array = rng.uniform(low, high, draw(shapes))
        return [array], {name: draw(strategy) for name, strategy in others.items()}

    return inputs


def two(low=0.5, high=4.0):
    """Two arrays that broadcast together, or one on a side of a number."""

    def inputs(draw, rng):
        arrays = [rng.uniform(low, high, shape) for shape in draw(broadcasting())]
        return arrays, {"number": draw(st.sampled_from([None, None, "left", "right"]))}

    return inputs


def away_from_0(inputs):
    """The same with no value near 0, where a function has a corner."""

    def moved(draw, rng):
        arrays, others = inputs(draw, rng)
        return [a + np.where(a < 0, -0.01, 0.01) for a in arrays], others

    return moved


def alike(least=0):
    """x, and dy of its shape."""

    def inputs(draw, rng):
        shape = tuple(max(n, least) for n in draw(shapes))
        return [rng.uniform(-3, 3, shape), rng.standard_normal(shape)], {}

    return inputs


def rows(*more, least=1, each=1, low=-5.0, high=5.0):
    """x (..., n) and for each of `more` an array: "row" (n,), "rows" (rows,) or a multiple of n.

    n is a multiple of `each`.
    """

    def inputs(draw, rng):
        shape = (*draw(outer), each * max(draw(widths), least))
        arrays = [rng.uniform(low, high, shape)]
        for kind in more:
            if kind == "row":
                arrays.append(rng.standard_normal(shape[-1:]))
            elif kind == "rows":
                arrays.append(rng.uniform(0.5, 2, int(np.prod(shape[:-1]))))
            else:
                arrays.append(rng.standard_normal((*shape[:-1], int(kind * shape[-1]))))
        return arrays, {}

    return inputs


def reduced(least=0):
    """An array, and the axes that it is reduced over."""

    def inputs(draw, rng):
        shape = tuple(max(n, least) for n in draw(shapes))
        axes = {"axis": draw(axes_of(shape)), "keepdims": draw(st.booleans())}
        return [rng.uniform(-3, 3, shape)], axes

    return inputs


def to_smaller(draw, rng):
    shape = draw(shapes)
    smaller = tuple(draw(st.sampled_from([n, 1])) for n in shape)
    start = draw(st.sampled_from([1, 0, *range(2, len(shape) + 1)]))
    return [rng.uniform(-3, 3, shape)], {"shape": smaller[start:]}


def to_larger(draw, rng):
    shape = draw(shapes)
    smaller = tuple(draw(st.sampled_from([n, 1])) for n in shape)[draw(st.integers(0, 1)) :]
    smaller = smaller if draw(st.booleans()) else (*shape[:-1], *([1] if shape else []))
    return [rng.uniform(-3, 3, smaller)], {"shape": shape}


def other_shape(draw, rng):
    shape = draw(shapes)
    return [rng.uniform(-3, 3, shape)], {"shape": draw(reshapes_of(shape))}


def other_order(draw, rng):
    n = len(shape := draw(shapes))
    rotated = [(i + 1) % n - n * draw(st.integers(0, 1)) for i in range(n)]
    axes = tuple(draw(st.permutations(rotated)))
    return [rng.uniform(-3, 3, shape)], {"axes": draw(st.sampled_from([axes, None]))}


def indexed(draw, rng):
    shape = draw(shapes)
    return [rng.uniform(-3, 3, shape)], {"key": draw(keys_of(shape))}


def put_back(draw, rng):
    shape = draw(shapes)
    key = draw(keys_of(shape))
    part = np.shape(np.empty(shape)[key])
    return [rng.uniform(-3, 3, part)], {"shape": shape, "key": key}


def joined(alike):
    """Some arrays and an axis: of one shape, or of different lengths along the axis."""

    def inputs(draw, rng):
        shape = draw(shapes.filter(lambda shape: alike or shape))
        n = len(shape) + alike
        axis = draw(st.sampled_from(range(n - 1, -n - 1, -1)))
        sizes = [list(shape) for _ in range(draw(st.sampled_from([3, 2, 1, 4])))]
        for i, size in enumerate(sizes if not alike else ()):
            size[axis] = draw(st.sampled_from([i, 1, 2, 0, 3]))
        return [rng.uniform(-3, 3, size) for size in sizes], {"axis": axis}

    return inputs


def some(draw, rng):
    """Some arrays of any shapes."""
    return [rng.uniform(-3, 3, draw(shapes)) for _ in range(draw(st.sampled_from([2, 1, 4])))], {}


def parted(draw, rng):
    shape = draw(shapes.filter(bool))
    axis = draw(st.sampled_from(range(len(shape) - 1, -len(shape) - 1, -1)))
    return [rng.uniform(-3, 3, shape)], {"axis": axis}


def cut(draw, rng):
    (array,), others = parted(draw, rng)
    n = array.shape[others["axis"]]
    divisors = [d for d in range(max(n, 3), 0, -1) if n % d == 0]
    return [array], others | {"sections": draw(st.sampled_from(divisors))}


def looked_up(draw, rng):
    n, shape = draw(st.sampled_from([4, 1, 2, 6])), draw(outer)
    return [rng.uniform(-3, 3, (n, draw(widths)))], {"indices": rng.integers(0, n, shape)}


def added_up(draw, rng):
    n, shape = draw(st.sampled_from([4, 1, 2, 6])), draw(outer)
    dy = rng.uniform(-3, 3, (*shape, draw(widths)))
    return [dy], {"indices": rng.integers(0, n, shape), "rows": n}


def classified(draw, rng):
    shape, n = draw(outer.filter(lambda shape: 0 not in shape)), draw(widths)
    return [rng.uniform(-5, 5, (*shape, n))], {"targets": rng.integers(0, n, shape)}


def classified_rows(draw, rng):
    """Probabilities (rows, classes), gradients of the losses (rows,), and targets."""
    n, classes = draw(st.sampled_from([5, 9, 1, 0])), draw(widths)
    arrays = [rng.uniform(0, 1, (n, classes)), rng.uniform(-1, 1, n)]
    return arrays, {"targets": rng.integers(0, classes, n)}
