"""Whole products against float64: every two choices of a call meet once, and more are drawn."""

from functools import cache, partial
from itertools import product as every

import drawn_large as large
import numpy as np
import pytest
from conftest import HALVES
from drawn import (
    IMPOSSIBLE,
    ORDERS,
    SEED,
    Operand,
    Suite,
    as_numpy,
    assert_within,
    drawn,
    draws,
    has_arrays,
    is_compiled,
    libraries,
    of_any_bits,
    takes_few,
    type_of_result,
)
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import MADE_SIZES, RUNGS, rung
from numbsparse.kernels.matmul.k0_cpu import lines

SIMULATED = device.SIMULATED and device.is_available()
SIMULATED_WORK = 50_000  # multiplications: simulated threads are slow
MANY = 64  # blocks: a dense product in float64 is quicker


@pytest.fixture(autouse=True)
def few_rows_are_few(monkeypatch):
    monkeypatch.setattr(lines, "pays", takes_few)


CALLS = {  # product of the ladder, and whether features come before the batch
    "x @ w": ("forward", False),
    "x @ w.T": ("input_grad", False),
    "w @ x": ("input_grad", True),
    "w.T @ x": ("forward", True),
    "sddmm": ("weight_grad", False),
    "sddmm.T": ("weight_grad", True),
}
SIZES = [4, 8, 16, 32, 64, 128]
BATCHES = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129]
FEW_BATCHES = [1, 7, 9, 33, 64, 65, 129]
FEW_ORDERS = ["C", "F", "C, gaps", "F, aligned gaps", "C, offset", "F, offset", "every second row",
              "every second value", "one row repeated"]  # fmt: skip
MISSING = {"whole": (0, 0), "ragged": (1, 3), "ragged rows": (2, 0), "ragged columns": (0, 1)}


@cache
def factors_of(place):
    slow = SIMULATED and place == "cuda"
    return {
        "kernel": ["auto", *(name for name in RUNGS if RUNGS[name] == place)],
        "call": list(CALLS),
        "numbers": ["float32", *HALVES, "float64" if place == "cpu" else "float32, high"],
        "size": SIZES,
        "batch": FEW_BATCHES if slow else BATCHES,
        "layout": ["random", "empty lines", "one block", "none", "full", "long column"],
        "features": list(MISSING),
        "library": libraries(place),
        "x": FEW_ORDERS if slow else list(ORDERS),
        "second": FEW_ORDERS[::2] if slow else list(ORDERS)[::2],  # operand of sddmm
        "out": ["none", "C", "C, offset"],
        "w": ["C", "C, offset", "read-only", "unaligned"],
        "values": ["normal", "wide", "infinite", "NaN"],
    }


ORDINARY = {
    "layout": ["random"],
    "features": ["whole"],
    "x": ["C", "F"],
    "second": ["C", "F"],
    "out": ["none"],
    "w": ["C"],
    "values": ["normal"],
}

OTHER_ORDERS = {  # which no kernel knows of: they are copied before
    "kernel": ["auto"],
    "call": ["x @ w", "w @ x", "sddmm"],
    "numbers": ["float32", HALVES[-1]],
    "size": [4],
    "batch": [9],
    "x": [order for order in ORDERS if order not in FEW_ORDERS],
    "second": ["C"],
}


def allowed(place, case):
    """Whether the library takes such a call, or one that goes on like this."""
    known, of = case.keys(), case.get
    sampled = "call" in known and "sddmm" in case["call"]
    if sampled and (of("out", "none") != "none" or (place, of("library")) == ("cuda", "numpy")):
        return False
    if "call" in known and not sampled and of("second", "C") != "C":
        return False
    if {of("x"), of("second")} & set(IMPOSSIBLE.get(of("library"), [])):
        return False
    if of("library") == "jax" and of("out", "none") != "none":
        return False
    if place == "cuda" and of("w") in ("read-only", "unaligned"):
        return False
    if not has_arrays(of("library"), of("numbers")):
        return False
    if place == "cpu" and of("kernel", "k0_reference") != "k0_reference" and "call" in known:
        product, _ = CALLS[case["call"]]
        if not is_compiled(of("numbers"), of("size"), product):
            return False
    slow = SIMULATED and place == "cuda" and {"size", "batch"} <= known
    if slow and case["batch"] * work_of_a_row(of("layout"), case["size"]) > SIMULATED_WORK:
        return False
    return serves(place, *map(of, ("kernel", "call", "numbers", "size", "batch")))


@cache
def serves(place, kernel, call, numbers, size, batch):
    """Whether the rung serves it, for some choice of what is None."""
    if kernel is None or kernel.startswith("auto"):
        return True
    some = ([call] if call else CALLS, [numbers] if numbers else factors_of(place)["numbers"])
    some += ([size] if size else SIZES, BATCHES if batch is None else [batch])
    for call_, numbers_, size_, batch_ in every(*some):
        dtype, precision = in_words(numbers_)
        asked = (CALLS[call_][0], size_, dtype, place, batch_, precision)
        if rung(kernel).unsupported(*asked) is None:
            return True
    return False


def in_words(numbers):
    """dtype, precision."""
    name, _, precision = numbers.partition(", ")
    return as_dtype(name), precision or "highest"


def grid_of(place, size):
    """Blocks down and across."""
    if place == "cuda" and SIMULATED:
        return {4: (5, 4), 8: (4, 5), 16: (3, 4), 32: (3, 2), 128: (1, 1)}.get(size, (1, 2))
    return (7, 6) if size < 64 else (3, 4)


@cache
def pattern_of(kind, grid):
    pattern = np.random.default_rng(SEED).random(grid) < 0.4
    pattern[-1, -1] = True  # at both edges
    if kind == "empty lines":
        pattern[0], pattern[:, 0] = False, False
    elif kind == "long column":
        pattern[:, :-1], pattern[:, -1] = False, True
    elif kind == "one block":
        pattern[:] = False
        pattern[-1, -1] = True
    elif kind in ("none", "full"):
        pattern[:] = kind == "full"
    return pattern


@cache
def work_of_a_row(layout, size):
    """Multiplications, at least, where the layout is None."""
    return max(pattern_of(layout or "none", grid_of("cuda", size)).sum(), 1) * size**2


def numbers(rng, kind, dtype, shape):
    a = rng.standard_normal(shape)
    if kind == "wide":
        most = 4 if dtype.itemsize == 2 else 20
        a *= 2.0 ** rng.integers(-most, most, shape)
    if kind in ("infinite", "NaN") and a.size:
        a.flat[rng.integers(a.size)] = np.nan if kind == "NaN" else rng.choice([-np.inf, np.inf])
    return of_any_bits(rng, a.astype(dtype))


def check(place, case, seed=0):
    """One call: its values, its type, and that nothing else was written."""
    rng = np.random.default_rng([SEED, seed])
    dtype, precision = in_words(case["numbers"])
    draw = partial(numbers, rng, case["values"], dtype)
    size, missing = case["size"], MISSING[case["features"]]
    if "rows" in case:
        pattern = large.pattern_of(rng, case, large.grid_of(case))
    else:
        pattern = pattern_of(case["layout"], grid_of(place, size))
    shape = tuple(n * size - less for n, less in zip(pattern.shape, missing, strict=True))
    values = draw((pattern.sum(), size, size))
    for block, (r, c) in zip(values, np.argwhere(pattern), strict=True):
        block[shape[0] - r * size :] = block[:, shape[1] - c * size :] = np.nan  # never read
    run = check_sampled if "sddmm" in case["call"] else check_product
    with large.forced(case["kernel"]) as kernel:
        how = {"kernel": kernel, "precision": precision}
        got, right, magnitude, terms = run(place, case, draw, values, pattern, shape, how)
    assert got.dtype == dtype
    eps = np.finfo(np.float64 if dtype == np.float64 else np.float32).eps
    bound = (terms + 2 + product_error(place, case)) * eps * magnitude
    if precision == "high":
        bound += 2.0**-9 * magnitude  # two operands, each within 2^-10 of itself
    rounding = float(finfo(dtype).eps) * np.where(np.isfinite(right), abs(right), 0)
    assert_within(got, right, bound + rounding + float(finfo(dtype).smallest_subnormal))


def product_error(place, case):
    """In units of 2^-23, what a float32 product may be off by."""
    if case["numbers"] != "float32" or place == "cpu":
        return 0
    name = case["kernel"].partition("/")[0]
    names = RUNGS if name.startswith("auto") else [name]
    return max(getattr(rung(name), "PRODUCT_ERROR", 0) for name in names)


def check_product(place, case, draw, values, pattern, shape, how):
    (product, feature_major), batch = CALLS[case["call"]], case["batch"]
    home = "numbsparse" if place == "cuda" else "numpy"
    layout, room = layout_in(case, draw.args[0], pattern)
    rest = np.full((room, *values.shape[1:]), np.nan, values.dtype)  # of no block
    kept = np.concatenate([values, rest])
    stored = Operand(kept.reshape(1, -1), case["w"], home, place)
    w = ns.BlockSparse(stored.array.reshape(kept.shape), layout, shape=shape)
    w = w if product == "forward" else w.T
    x = draw((w.shape[0], batch) if feature_major else (batch, w.shape[0]))
    x = Operand(x, case["x"], case["library"], place)
    ends = (w.shape[1], batch) if feature_major else (batch, w.shape[1])
    if case["out"] != "none":
        out = Operand(np.full(ends, np.nan, values.dtype), case["out"], case["library"], place)
        how["out"] = out.array
    y = ns.matmul(w.T, x.array, **how) if feature_major else ns.matmul(x.array, w, **how)
    assert y is out.array if "out" in how else type(y) is type_of_result(x.array, place)
    assert x.unchanged()
    assert stored.unchanged()
    assert "out" not in how or out.only_it_changed()
    exact, got = x.values.astype(np.float64), as_numpy(y)
    assert got.shape == ends
    exact, got = (exact.T, got.T) if feature_major else (exact, got)
    operands = values.astype(np.float64), pattern, product != "forward"
    right = multiplied(exact, *operands, w.shape[1])
    operands = abs(operands[0]), *operands[1:]
    terms = pattern.sum(0 if product == "forward" else 1).max() * case["size"]
    return got, right, multiplied(abs(exact), *operands, w.shape[1]), terms


def layout_in(case, rng, pattern):
    """The layout, made on the device or not, and how many blocks it has room for beyond."""
    return large.made_layout(rng, pattern) if case.get("made") else (pattern, 0)


def multiplied(x, values, pattern, transposed, width):
    """x @ w, or x @ w.T, over only the kept blocks."""
    y, size = np.zeros((len(x), width)), values.shape[1]
    if len(values) > MANY and np.isfinite(x).all():
        shape = (width, x.shape[1]) if transposed else (x.shape[1], width)
        w = large.dense_of(values, pattern, shape)
        with np.errstate(invalid="ignore"):
            return x @ (w.T if transposed else w)
    for block, (r, c) in zip(values, np.argwhere(pattern), strict=True):
        block, r, c = (block.T, c, r) if transposed else (block, r, c)
        rows, columns = x[:, r * size :][:, :size], y[:, c * size :][:, :size]
        with np.errstate(invalid="ignore"):
            columns += rows @ block[: rows.shape[1], : columns.shape[1]]
    return y


def check_sampled(place, case, draw, values, pattern, shape, how):
    (_, feature_major), batch = CALLS[case["call"]], case["batch"]
    made, room = layout_in(case, draw.args[0], pattern)
    values = np.concatenate([values, np.zeros((room, *values.shape[1:]), values.dtype)])
    values = ns.to_device(values) if case.get("made") else values
    w = ns.BlockSparse(values, made, shape=shape).to(place)
    layout = w.T if feature_major else w
    rows, columns = layout.shape
    a = Operand(draw((rows, batch)), case["x"], case["library"], place)
    b = Operand(draw((batch, columns)), case["second"], case["library"], place)
    s = ns.sddmm(a.array, b.array, layout, **how)
    assert (s.shape, s.place, s.is_transposed) == (layout.shape, place, layout.is_transposed)
    assert a.unchanged()
    assert b.unchanged()
    x, dy = (b.values, a.values.T) if feature_major else (a.values.T, b.values)
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    got, right = as_numpy(s.values), sampled(x, dy, pattern, case["size"])
    assert not got[len(right) :].any()
    got = got[: len(right)]
    if not (np.isfinite(x).all() and np.isfinite(dy).all()):
        beyond = sampled(np.ones_like(x), np.ones_like(dy), pattern, case["size"]) == 0
        got = np.where(beyond & (batch > 0), 0, got).astype(got.dtype)  # NaN may stand there
    return got, right, sampled(abs(x), abs(dy), pattern, case["size"]), batch


def sampled(x, dy, pattern, size):
    """x.T @ dy at the kept blocks; zero beyond the edges."""
    blocks = np.zeros((pattern.sum(), size, size))
    if len(blocks) > MANY and np.isfinite(x).all() and np.isfinite(dy).all():
        return large.blocks_of(x.T @ dy, pattern, size)
    for block, (r, c) in zip(blocks, np.argwhere(pattern), strict=True):
        rows, columns = x[:, r * size :][:, :size], dy[:, c * size :][:, :size]
        with np.errstate(invalid="ignore"):
            block[: rows.shape[1], : columns.shape[1]] = rows.T @ columns
    return blocks


# SciPy and the simulator say where NaN comes from infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")

SUITE = Suite(factors_of, allowed, check)
for each_place in SUITE.places:
    few = factors_of(each_place) | ORDINARY
    few["library"] = ["numpy"] if each_place == "cpu" else ["numpy", "numbsparse"]
    if SIMULATED and each_place == "cuda":
        SUITE.add(each_place, few | {"batch": [8, 31, 33]})
        SUITE.add(each_place, few | {"batch": [0], "size": [8, 32]})
        SUITE.add(each_place, few | OTHER_ORDERS)
    else:
        SUITE.add(each_place, few, [("kernel", "call", "batch")])
        SUITE.add(each_place, few | {"batch": [0]}, [("kernel", "call", "size", "x", "second")])
    if each_place == "cpu":  # few rows are read where they are
        SUITE.add(each_place, few | {"batch": [1, 7], "x": ["field"]})


@pytest.mark.parametrize(("place", "number"), SUITE.numbers())
def test_every_two_choices(place, number):
    SUITE.run(place, number)


@pytest.mark.parametrize("place", SUITE.places)
@pytest.mark.slow
def test_pairs_that_are_left_out_are_in_no_case(place):
    """`pytest -s -k left_out` says how many cases there are, and how many pairs they cover."""
    SUITE.check_left_out(place)


@pytest.mark.parametrize("place", SUITE.places)
def test_drawn(place):
    @draws(20 if place == "cpu" or not SIMULATED else 7, place)
    @given(case=drawn(factors_of(place), partial(allowed, place)), number=st.integers(0, 2**32 - 1))
    def run(case, number):
        check(place, case, number)

    run()


def large_factors(rng):
    """A layout, orders, rungs and their tiles as they come; sizes up to some thousand."""
    own = factors_of(large.PLACE)
    return own | {
        "kernel": own["kernel"] + large.FORCED,
        **large.measures(rng),
        "features": ["whole", *MISSING],
        "library": [name for name in own["library"] if name != "jax"],
        "values": ["normal", "normal", "wide", "infinite", "NaN"],
        "made": [False, False, True],
    }


MADE_BY = ("auto", "k5_tensor_core", "k6_hopper", "k8_small_batch")


def large_allowed(case):
    of = case.get
    if of("made") and (
        large.PLACE == "cpu"
        or of("kernel", "auto") not in MADE_BY
        or of("size", 32) not in MADE_SIZES
    ):
        return False
    return large.fits(case) and allowed(large.PLACE, {**case, "layout": "none"})


def test_large(number):
    case = large.large_case(number, large_factors, large_allowed)
    dtype, precision = in_words(case["numbers"])
    how = CALLS[case["call"]][0], case["size"], dtype, case["batch"], precision
    case["kernel"] = large.with_tile(np.random.default_rng(number), case["kernel"], *how)
    check(large.PLACE, case, number)
