"""Gated products and their gradients against float64: any layout, rung, order and gates."""

from functools import partial

import drawn_large as large
import numpy as np
from conftest import HALVES
from drawn import IMPOSSIBLE, ORDERS, Operand, as_numpy, assert_within
from drawn_large import PLACE
from gate_helpers import UNIT

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import MADE_SIZES, PRODUCTS, RUNGS, rung

NUMBERS = ["float32", *HALVES, "float32, high" if PLACE == "cuda" else "float64"]
RUNGS_HERE = [name for name, place in RUNGS.items() if place == PLACE]
HOME = "numbsparse" if PLACE == "cuda" else "numpy"
THERE = [order for order in ORDERS if order not in IMPOSSIBLE[HOME]]
MISSING = {"whole": (0, 0), "ragged": (1, 3)}
MADE_BY = ("auto", "k5_tensor_core", "k6_hopper", "k8_small_batch")


def factors_of(rng):
    return {
        "kernel": ["auto", *RUNGS_HERE, *large.FORCED],
        "numbers": NUMBERS,
        "size": [4, 8, 16, 32, 64, 128],
        **large.measures(rng),
        "features": ["whole", *MISSING],
        "first": [False, True],
        "transposed": [False, True],
        "x": THERE,
        "dy": THERE,
        "gates": ["some zero", "most zero", "ones", "zeros and ones", "none zero", "all zero"],
        "values": ["normal", "wide"],
        "made": [False, False, True],
    }


def allowed(case):
    of = case.get
    if of("made") and (
        PLACE == "cpu" or of("kernel", "auto") not in MADE_BY or of("size", 32) not in MADE_SIZES
    ):
        return False
    if of("kernel", "auto") in RUNGS and {"numbers", "size", "batch"} <= case.keys():
        dtype, precision = in_words(case["numbers"])
        how = case["size"], dtype, PLACE, case["batch"], precision
        if any(rung(case["kernel"]).unsupported(product, *how) for product in PRODUCTS):
            return False
    return large.fits(case | {"batch": 3 * case["batch"]} if "batch" in case else case)


def in_words(numbers):
    """dtype, precision."""
    name, _, precision = numbers.partition(", ")
    return as_dtype(name), precision or "highest"


def gates_of(rng, kind, n, dtype):
    zero = {"some zero": 0.5, "most zero": 0.95, "zeros and ones": 0.5, "all zero": 1}.get(kind, 0)
    gates = np.ones(n) if "ones" in kind else rng.uniform(0.5, 2, n) * rng.choice([-1, 1], n)
    return (gates * (rng.random(n) >= zero)).astype(dtype)


def numbers(rng, kind, dtype, shape):
    a = rng.standard_normal(shape)
    if kind == "wide":
        a *= 2.0 ** rng.integers(-3, 3, shape)
    return a.astype(dtype)


def weight_of(case, rng, pattern, values, gates, shape):
    """w as it is stored, and its gates; room that is for no block has NaN."""
    layout, room = large.made_layout(rng, pattern) if case["made"] else (ns.Layout(pattern), 0)
    kept = np.concatenate([values, np.full((room, *values.shape[1:]), np.nan, values.dtype)])
    gates = np.concatenate([gates, np.zeros(room, gates.dtype)])
    if case["transposed"] and not case["made"]:  # gates are in the order of w.data
        gates = gates[as_data(pattern)]
    put = ns.to_device if PLACE == "cuda" else np.asarray
    return ns.BlockSparse(put(kept), layout, shape=shape), put(gates)


def as_data(pattern):
    """The blocks of a layout in the order in which its transpose has them."""
    return ns.Layout(pattern).index.columns.blocks


def check(case, number):
    """One product, its gradients, and that no operand was written."""
    rng = np.random.default_rng(number)
    dtype, precision = in_words(case["numbers"])
    draw, size = partial(numbers, rng, case["values"], dtype), case["size"]
    pattern, cut = large.pattern_of(rng, case, large.grid_of(case)), MISSING[case["features"]]
    shape = tuple(n * size - less for n, less in zip(pattern.shape, cut, strict=True))
    values = draw((int(pattern.sum()), size, size))
    for block, (r, c) in zip(values, size * np.argwhere(pattern), strict=True):
        block[shape[0] - r :] = block[:, shape[1] - c :] = np.nan  # never read
    gates = gates_of(rng, case["gates"], len(values), ops.state_dtype(dtype))
    w, given = weight_of(case, rng, pattern, values, gates, shape)
    w = w.T if case["transposed"] else w
    inner, outer = w.shape[:: -1 if case["first"] else 1]
    x, dy = (
        Operand(draw((case["batch"], n)[:: -1 if case["first"] else 1]), case[name], HOME, PLACE)
        for name, n in (("x", inner), ("dy", outer))
    )
    with large.forced(case["kernel"]) as kernel:
        got = gradients(case, x.array, w, given, dy.array, kernel=kernel, precision=precision)
    y, dx, dw, dg = map(as_numpy, got)
    assert not dw[len(values) :].any()
    dw, dg = dw[: len(values)], dg[: len(values)]
    if case["transposed"] and not case["made"]:
        dg[as_data(pattern)] = dg.copy()
    right = rights(
        case, x.values, dy.values, np.where(np.isnan(values), 0, values), gates, pattern, shape
    )
    for found, of in zip((y, dx, dw, dg), right, strict=True):
        within(found, *of, dtype, precision)
    assert x.unchanged()
    assert dy.unchanged()


def gradients(case, x, w, gates, dy, **how):
    """y, dx, the values of dw as w is stored, and the gradient of the gates."""
    tx, tw, tg = (ns.Tensor(a, requires_grad=True) for a in (x, w, gates))
    one, other = (tw, tx) if case["first"] else (tx, tw)
    y = ns.matmul(one, other, gate=tg, **how)
    device.synchronize()  # so that an error is of this product
    y.backward(dy)
    dw = tw.grad.data.T if case["transposed"] else tw.grad.data
    return y.data, tx.grad.data, dw.values, tg.grad.data


def within(got, exact, magnitude, terms, dtype, precision):
    """As sums of so many terms are, of gated blocks that were rounded."""
    unit, wide = UNIT[str(dtype)], min(UNIT[str(dtype)], UNIT["float32"])
    bound = (4 * unit + 2 * (terms + 16) * wide + 2.0**-9 * (precision == "high")) * magnitude
    least = 4 * float(finfo(dtype).smallest_normal)
    assert_within(got, exact, bound + least)


def rights(case, x, dy, values, gates, pattern, shape):
    """Of y, dx, dw and the gradient of the gates: the value, of what size, a sum of how many."""
    x, dy, values, gates = (a.astype(np.float64) for a in (x, dy, values, gates))
    x, dy = (x.T, dy.T) if case["first"] else (x, dy)
    over = case["transposed"] != case["first"]
    x, dy = (dy, x) if over else (x, dy)  # x of w as it is stored, and dy
    size, kept, each = case["size"], gates != 0, gates[:, None, None]
    w = large.dense_of(values * each, pattern, shape)
    n = max(shape) + case["batch"]

    def products(x, dy, w, values, gates):
        dw = large.blocks_of(x.T @ dy, pattern, size)
        return x @ w, dy @ w.T, dw * gates, (dw * values * kept[:, None, None]).sum((1, 2))

    both = zip(
        products(x, dy, w, values, each),
        products(abs(x), abs(dy), abs(w), abs(values), abs(each)),
        (n, n, n, n + size**2),
        strict=True,
    )
    y, dx, *rest = ([a, b, terms] for a, b, terms in both)
    y, dx = (dx, y) if over else (y, dx)
    if case["first"]:
        y[:2], dx[:2] = ((a.T for a in of[:2]) for of in (y, dx))
    return y, dx, *rest


def test_large(number):
    check(large.large_case(number, factors_of, allowed), number)
