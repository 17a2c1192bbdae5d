"""Whole convolutions against float64: every two choices of a call meet once, and more are drawn."""

import sys
from functools import cache, partial
from importlib import import_module
from itertools import product as every
from math import prod

import drawn_large as large
import numpy as np
import pytest
from conftest import HALVES
from drawn import (
    SEED,
    Operand,
    Space,
    Suite,
    as_numpy,
    assert_within,
    drawn,
    draws,
    has_arrays,
    libraries,
    of_any_bits,
    type_of_result,
)
from drawn_images import (
    OF_NUMPY,
    ORDERS,
    SIZES_OF_WINDOWS,
    Images,
    convolved,
    pixels_of_taps,
    sizes_of,
    window_of,
)
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device
from numbsparse.device import DeviceArray
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels import matmul
from numbsparse.kernels.conv import RUNGS, Window, rung

SIMULATED = device.SIMULATED and device.is_available()
MOST_WORK = {"cpu": 1 << 23, "cuda": 1 << 14 if SIMULATED else 1 << 27}

CALLS = {"conv": "forward", "conv_transpose": "input_grad", "conv_weight_grad": "weight_grad"}
GRIDS = {4: (5, 3), 5: (2, 3), 8: (3, 5), 16: (2, 3), 32: (2, 2), 64: (1, 2), 128: (1, 1)}
SPACES = [(7,), (1,), (33,), (5, 4), (1, 1), (3, 9), (2, 3, 4), (1, 2, 1)]
LARGER_SPACES = [(300,), (20, 17), (9, 4, 6)]
LAYOUTS = ["random", "empty lines", "one block", "none", "full", "long column", "long row", "tap"]
MISSING = {"whole": (0, 0), "ragged": (1, 3), "ragged rows": (2, 0), "ragged columns": (0, 1)}


@cache
def factors_of(place):
    slow = SIMULATED and place == "cuda"
    return {
        "kernel": ["auto", *(name for name in RUNGS if RUNGS[name] == place)],
        "call": list(CALLS),
        "numbers": ["float32", *HALVES, "float64" if place == "cpu" else "float32, high"],
        "size": list(GRIDS),
        "batch": [2, 0, 1, 3] + [5, 33, 65] * (not slow),
        "space": SPACES + LARGER_SPACES * (not slow),
        **{name: list(values) for name, values in SIZES_OF_WINDOWS.items()},
        "layout": LAYOUTS,
        "features": list(MISSING),
        "library": libraries(place),
        "x": list(ORDERS)[:: 2 if slow else 1],
        "dy": list(ORDERS)[:: 4 if slow else 2],
        "w": ["C", "C, offset", "read-only"],
        "values": ["normal", "wide", "infinite", "NaN"],
        "parts": ["as usual", "many"],
    }


def of_copy_engine():
    """More of what the rung for it serves."""
    return factors_of("cuda") | {
        "kernel": ["k4_wgmma", "k6_strips"],
        "numbers": [*HALVES, "float32", "float32, high"],
        "size": [16, 32, 8],
        "batch": [2, 1, 0],
        "space": [(5, 4), (7,), (2, 3, 4), (1, 1)],
        "kernel_size": ["3", "1", "2"],
        "stride": ["1", "2"],
        "padding": ["1", "0", "same"],
        "dilation": ["1", "2"],
        "layout": ["random", "full", "one block"],
        "features": ["whole"],
        "library": ["numbsparse"],
        "values": ["normal", "infinite"],
        **{name: ["C"] for name in ("x", "dy", "w")},
    }


OF_WINDOW = ("call", "space", *SIZES_OF_WINDOWS)  # the factors that make it


def allowed(place, case):
    """Whether the library takes such a call, or one that goes on like this."""
    of = case.get
    library, orders = of("library"), {of("x", "C"), of("dy", "C")}
    calls = [call for call in CALLS if of("call", call) == call and takes(place, call, case)]
    call = calls[0] if len(calls) == 1 else None
    if not calls:
        return False
    if library not in (None, "numpy") and orders & set(OF_NUMPY):
        return False
    if (library == "jax" and orders != {"C"}) or not has_arrays(library, of("numbers")):
        return False
    if place == "cuda" and of("w") == "read-only":
        return False
    if not has_window(call, *map(of, OF_WINDOW[1:])):
        return False
    known = case.keys() >= {"size", "batch", "layout", *OF_WINDOW}
    if known and "rows" not in case and work(place, case) > MOST_WORK[place]:
        return False
    if not serves(place, of("kernel"), call, of("numbers"), of("size")):
        return False
    return place == "cpu" or of("kernel") in (None, "auto") or serves_call(call, case)


def takes(place, call, case):
    """Whether a call has these arguments."""
    of = case.get
    if call == "conv_weight_grad":
        return (place, of("library")) != ("cuda", "numpy") and of("output_padding") != "most"
    return of("dy", "C") == "C" and (call == "conv_transpose" or of("output_padding") != "most")


@cache
def has_window(*choices):
    """Whether images have it, for some choice of what is None."""
    factors = factors_of("cpu")
    some = ([one] if one else factors[name] for name, one in zip(OF_WINDOW, choices, strict=True))
    return any(window_of(*sizes) for sizes in every(*some))


@cache
def serves(place, kernel, call, numbers, size):
    """Whether the rung serves it, for some choice of what is None."""
    names = [name for name in RUNGS if RUNGS[name] == place]
    if kernel == "auto":
        names = [name for name in names if name != "k0_reference"]  # which is never chosen
    some = ([call] if call else CALLS, [numbers] if numbers else factors_of(place)["numbers"])
    some += ([size] if size else GRIDS, names if kernel in (None, "auto") else [kernel])
    for call_, numbers_, size_, name in every(*some):
        dtype, precision = in_words(numbers_)
        if rung(name).unsupported(CALLS[call_], size_, dtype, place, 1, precision) is None:
            return True
    return False


def serves_call(call, case):
    """Whether a rung for GPUs serves this call, for all that is known of it."""
    of = case.get
    strided = of("stride", "1") != "1" and call in ("conv", "conv_weight_grad")
    if of("kernel") in ("k4_wgmma", "k6_strips") and strided:
        return False
    if not case.keys() >= {"call", "numbers", "size", "batch", "features", *OF_WINDOW}:
        return True
    if ("rows" in case) != ("columns" in case):
        return True
    dtype, precision = in_words(case["numbers"])
    *sizes, _ = window_of(*map(of, OF_WINDOW))
    window = in_three_axes(*sizes)
    features = features_of(case, grid_in("cuda", case))
    how = CALLS[call], case["size"], dtype, "cuda", case["batch"], precision
    return rung(case["kernel"]).unsupported(*how, window, *features) is None


def in_three_axes(*sizes):
    """The window as kernels take it: axes of length 1, and no padding, in front."""
    ahead = (1, 1, 1, 1, 0, 1)
    return Window(*((n,) * (3 - len(of)) + of for n, of in zip(ahead, sizes, strict=True)))


def in_words(numbers):
    """dtype, precision."""
    name, _, precision = numbers.partition(", ")
    return as_dtype(name), precision or "highest"


def problem_of(place, case, seed=0):
    """The window, and the pattern (taps, block rows, block columns)."""
    window = window_of(*(case[name] for name in OF_WINDOW))
    shape = prod(window.kernel), *grid_in(place, case)
    if "rows" in case:
        return window, large.pattern_of(np.random.default_rng(seed), case, shape)
    return window, pattern_of(case["layout"], shape)


def grid_in(place, case):
    return large.grid_of(case) if "rows" in case else grid_of(place, case["size"])


def grid_of(place, size):
    """Block rows of a tap, and block columns."""
    return GRIDS[size] if SIMULATED and place == "cuda" else (4, 3)


@cache
def pattern_of(kind, shape):
    pattern = np.random.default_rng(SEED).random(shape) < 0.5
    pattern[-1, -1, -1] = True  # at both edges
    if kind == "empty lines":
        pattern[:, 0], pattern[:, :, 0] = False, False
    elif kind == "long column":
        pattern[:, :, :-1], pattern[:, :, -1] = False, True
    elif kind == "long row":
        pattern[:, :-1], pattern[:, -1] = False, True
    elif kind == "tap":
        pattern[:-1] = False
    elif kind == "one block":
        pattern[:] = False
        pattern[-1, -1, -1] = True
    elif kind in ("none", "full"):
        pattern[:] = kind == "full"
    return pattern


def work(place, case):
    """Multiplications, about; in the simulator those of whole tiles, and what threads cost."""
    window, pattern = problem_of(place, case)
    size, batch, kept = case["size"], case["batch"], pattern.sum()
    if not (SIMULATED and place == "cuda"):
        seen = np.dot(pixels_of_taps(window), pattern.sum(axis=(1, 2)))
        return max(batch * seen, kept) * size**2
    threads = kept * size**2
    outputs = batch * prod(window.small)
    if case["call"] != "conv_weight_grad":
        space, across = (window.small, 2) if case["call"] == "conv" else (window.big, 1)
        threads = batch * prod(space) * pattern.shape[across] * size
        outputs = max(outputs, batch * prod(space) // prod(window.stride))
    return max(outputs * kept * max(size, 16) ** 2, 4 * threads, kept * size**2)


def numbers(rng, kind, dtype, shape):
    a = rng.standard_normal(shape)
    if kind == "wide":
        most = 4 if dtype.itemsize == 2 else 20
        a *= 2.0 ** rng.integers(-most, most, shape)
    if kind in ("infinite", "NaN") and a.size:
        a.flat[rng.integers(a.size)] = np.nan if kind == "NaN" else rng.choice([-np.inf, np.inf])
    return of_any_bits(rng, a.astype(dtype))


def check(place, case, seed=0):
    """One call: its values, its type, and that no operand was written."""
    dtype, precision = in_words(case["numbers"])
    draw = partial(numbers, np.random.default_rng([SEED, seed]), case["values"], dtype)
    window, pattern = problem_of(place, case, seed)
    how = {**sizes_of(case), "kernel": case["kernel"], "precision": precision}
    run = check_gradient if case["call"] == "conv_weight_grad" else check_images
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch, place, case["parts"])
        got, right, magnitude, terms = run(place, case, draw, window, pattern, how)
    assert (got.dtype, got.shape) == (dtype, right.shape)
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
    rungs = [rung(name) for name in (RUNGS if case["kernel"] == "auto" else [case["kernel"]])]
    if case["kernel"] == "auto":  # one tap may be a product of matrices
        rungs += map(matmul.rung, matmul.RUNGS)
    return max(getattr(of, "PRODUCT_ERROR", 0) for of in rungs)


def prepare(patch, place, parts):
    """Results are NaN before; sums and images come in parts where they are small, too."""

    def blank(shape, like):
        full = np.full(shape, np.nan, like.dtype)
        return device.to_device(full) if isinstance(like, DeviceArray) else full

    patch.setattr(import_module("numbsparse.ops.conv"), "empty_beside", blank)
    if parts == "many" and place == "cpu":
        for name in ("lines", "weight_grad"):
            patch.setattr(import_module(f"numbsparse.kernels.conv.k0_cpu.{name}"), "SLAB", 1)
    elif parts == "many":
        module = import_module("numbsparse.kernels.conv.k4_wgmma.weight_grad")
        patch.setattr(module, "pieces_of", lambda items, tiles, *_: min(tiles, 3))
        regions = import_module("numbsparse.kernels.matmul.k7_small_blocks.regions")
        shared = lambda index, B, widths, batch, ways, _: (ways[0].region._replace(SPLIT=2), 1)  # noqa: E731
        patch.setattr(regions, "region_for", shared)
        for name, most in (("IN_CACHE", 1), ("IN_MEMORY", 1), ("ROWS", 16)):
            patch.setattr(import_module("numbsparse.kernels.conv.k2_unfolded"), name, most)


def features_of(case, grid):
    return [
        n * case["size"] - less for n, less in zip(grid, MISSING[case["features"]], strict=True)
    ]


def weight_of(case, values, pattern):
    """A matrix of values in memory (1, all); with "ragged" it ends with the last tap's features."""
    size, (taps, rows, columns) = case["size"], pattern.shape
    features = features_of(case, pattern.shape[1:])
    height = taps * rows * size - (rows * size - features[0]) * (case["features"] == "ragged")
    kept = pattern.reshape(taps * rows, columns)
    return ns.BlockSparse(values.reshape(kept.sum(), size, size), kept, shape=(height, features[1]))


def others(case):
    """The numbers beside x: outside of an image zero times what is not finite may be either."""
    inside = case["padding"] in ("0", "valid") and case["call"] != "conv_transpose"
    return case["values"] if inside or case["values"] == "wide" else "normal"


def check_images(place, case, draw, window, pattern, how):
    product, size, features = (
        CALLS[case["call"]],
        case["size"],
        features_of(case, pattern.shape[1:]),
    )
    values = draw.func(draw.args[0], others(case), draw.args[2], (pattern.sum(), size, size))
    for block, (_, r, c) in zip(values, np.argwhere(pattern), strict=True):
        block[features[0] - r * size :] = block[:, features[1] - c * size :] = np.nan  # never read
    home = "numbsparse" if place == "cuda" else "numpy"
    stored = Operand(values.reshape(1, -1), case["w"], home, place)
    w = weight_of(case, stored.array, pattern)
    if product == "forward":
        space, (channels, out_channels) = window.big, features
    else:
        space, (out_channels, channels) = window.small, features
        how |= {"output_padding": window.extra}
        how |= {"out_features": features[0]} if features[0] % size else {}
    x = Images(draw((case["batch"], *space, channels)), case["x"], case["library"], place)
    y = getattr(ns, case["call"])(x.array, w, **how)
    assert type(y) is type_of_result(x.array, place)
    assert x.unchanged()
    assert stored.unchanged()
    exact = partial(convolved, product, pattern=pattern, size=size, window=window)
    operands = x.values.astype(np.float64), values.astype(np.float64)
    right, magnitude = exact(*operands), exact(*map(abs, operands))
    terms = pattern.sum(axis=(0, 1 if product == "forward" else 2)).max() * size
    return as_numpy(y), right[..., :out_channels], magnitude[..., :out_channels], terms


def check_gradient(place, case, draw, window, pattern, how):
    size, features, batch = case["size"], features_of(case, pattern.shape[1:]), case["batch"]
    unread = np.full((1, pattern.sum() * size**2), np.nan, draw.args[2])
    w = weight_of(case, unread, pattern).to(place)
    x, dy = draw((batch, *window.big, features[0])), None
    dy = draw.func(draw.args[0], others(case), draw.args[2], (batch, *window.small, features[1]))
    x = Images(x, case["x"], case["library"], place)
    dy = Images(dy, case["dy"], case["library"], place)
    dw = ns.conv_weight_grad(x.array, dy.array, w, **how)
    assert (dw.shape, dw.place, dw.layout) == (w.shape, place, w.layout)
    assert x.unchanged()
    assert dy.unchanged()
    exact = partial(convolved, "weight_grad", pattern=pattern, size=size, window=window)
    operands = x.values.astype(np.float64), dy.values.astype(np.float64)
    got, right, terms = as_numpy(dw.values), exact(*operands), batch * prod(window.small)
    if not all(np.isfinite(a).all() for a in operands):  # beyond the edges NaN may stand
        inside = exact(*map(np.ones_like, operands)) > 0
        got = np.where(inside, got, right).astype(got.dtype)
    return got, right, exact(*map(abs, operands)), terms


# SciPy and the simulator say where NaN comes from infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")

SUITE = Suite(factors_of, allowed, check)
if "cuda" in SUITE.places:
    SUITE.add("cuda", of_copy_engine())


@pytest.mark.parametrize(("place", "number"), SUITE.numbers())
def test_every_two_choices(place, number):
    SUITE.run(place, number)


@pytest.mark.parametrize("place", SUITE.places)
def test_pairs_that_are_left_out_are_in_no_case(place):
    """`pytest -s -k left_out` says how many cases there are, and how many pairs they cover."""
    SUITE.check_left_out(place)


@pytest.mark.skipif("cuda" not in SUITE.places, reason="no GPU and no simulator")
def test_pixels_longer_than_a_line_of_the_cache(monkeypatch):
    """Where they begin anywhere they are copied, so that each begins at a line: with gaps."""
    monkeypatch.setattr(sys.modules[__name__], "grid_of", lambda _, size: (-(-80 // size),) * 2)
    factors = factors_of("cuda") | {
        "numbers": ["float32", HALVES[-1]],  # of either 16 bits as many bytes
        "size": [8, 16, 32],
        "batch": [2, 1],
        "space": [(3,), (2, 2)],
        "kernel_size": ["2"],
        "layout": ["one block"],
        "library": ["numbsparse"],
        "x": ["offset"],
        "dy": ["C", "offset"],
        "w": ["C", "C, offset"],
        "values": ["normal"],
    }
    groups = [("kernel", "call", "numbers")]
    for number, case in enumerate(Space(factors, partial(allowed, "cuda"), groups).covering()):
        print(number, case)
        check("cuda", case, number)


@pytest.mark.slow
@pytest.mark.parametrize("place", SUITE.places)
def test_drawn(place):
    @draws(20, place)
    @given(case=drawn(factors_of(place), partial(allowed, place)), number=st.integers(0, 2**32 - 1))
    def run(case, number):
        check(place, case, number)

    run()


LARGE_SPACES = [
    *[(2000,), (333,), (40, 50), (28, 28), (56, 13), (9, 10, 11), (16, 16, 4)] * large.ON_GPU
]


def large_factors(rng):
    own = factors_of(large.PLACE)
    return own | {
        "batch": large.sizes(rng, 1, 64 if large.ON_GPU else 3),
        "space": SPACES + LARGE_SPACES * 2,
        "rows": large.sizes(rng, *((4, 1024) if large.ON_GPU else (4, 32))),
        "columns": large.sizes(rng, *((4, 1024) if large.ON_GPU else (4, 32))),
        "layout": large.LAYOUTS,
        "density": large.DENSITIES,
        "features": ["whole", *MISSING],
        "library": [name for name in own["library"] if name != "jax"],
        "x": [*["C"] * 5, *own["x"]],
        "dy": [*["C"] * 5, *own["dy"]],
        "values": ["normal", "normal", "wide", "NaN"],
        "parts": ["as usual"],
    }


def large_allowed(case):
    if case.keys() >= {"rows", "columns", "batch", "size", *OF_WINDOW}:
        window = window_of(*(case[name] for name in OF_WINDOW))
        if window is None:
            return False
        pixels = case["batch"] * max(prod(window.big), prod(window.small))
        if not large.fits(case | {"batch": pixels * prod(window.kernel)}):
            return False
    return large.fits(case) and allowed(large.PLACE, case)


def test_large(number):
    check(large.PLACE, large.large_case(number, large_factors, large_allowed), number)
