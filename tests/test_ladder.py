"""Every rung, product, dtype and odd shape against k0_reference."""

import re
from itertools import product as every
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import HALVES
from drawn import is_compiled, takes_few

from numbsparse import device
from numbsparse.device import memory
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import (
    LADDER,
    PRECISIONS,
    PRODUCTS,
    RUNGS,
    k0_reference,
    n_tiles,
)
from numbsparse.kernels.matmul.k0_cpu import lines
from numbsparse.testing import Case, check_rung


@pytest.fixture(autouse=True)
def few_rows_are_few(monkeypatch):
    monkeypatch.setattr(lines, "pays", takes_few)


SMALL = [
    Case(batch=0, in_features=8, out_features=8, block_size=4),
    Case(batch=1, in_features=12, out_features=8, block_size=4),
    Case(batch=3, in_features=10, out_features=15, block_size=4),
    Case(batch=5, in_features=16, out_features=24, block_size=8),
    Case(batch=9, in_features=9, out_features=23, block_size=8),
    Case(batch=5, in_features=32, out_features=16, block_size=16, density=1),
    Case(batch=1, in_features=16, out_features=16, block_size=16, density=0),
    Case(batch=2, in_features=33, out_features=31, block_size=32, density=1),
    Case(batch=69, in_features=17, out_features=15, block_size=8, density=1),
]
LARGE = [
    Case(batch=63, in_features=96, out_features=64, block_size=16),
    Case(batch=65, in_features=130, out_features=70, block_size=8),
    Case(batch=194, in_features=256, out_features=320, block_size=32),
    Case(batch=33, in_features=100, out_features=257, block_size=32),
    Case(batch=17, in_features=192, out_features=128, block_size=64, density=1),
    Case(batch=31, in_features=100, out_features=190, block_size=64),
    Case(batch=12, in_features=384, out_features=256, block_size=128),
    Case(batch=130, in_features=129, out_features=255, block_size=128, density=1),
    Case(batch=257, in_features=200, out_features=72, block_size=8),
    Case(batch=289, in_features=90, out_features=150, block_size=16),
    Case(batch=263, in_features=200, out_features=300, block_size=64),
    Case(batch=498, in_features=1000, out_features=63, block_size=4, density=0.1),
]
ON_GPU = device.is_available() and not device.SIMULATED
# A simulated GPU thread is an operating-system thread: the large cases are for real GPUs and CPUs.
PLACES = {"cpu": (SMALL + LARGE, ["float32", "float64", *HALVES])}
PLACES["cuda"] = (SMALL + LARGE * ON_GPU, ["float32", *HALVES])


FEW = SMALL[1::2] + LARGE * ON_GPU  # of each block size up to 32 one

SIZES = (4, 8, 16, 32, 64, 128)


def runs():
    for (name, rung), (place, (cases, dtypes)) in every(LADDER.items(), PLACES.items()):
        for shift, product in enumerate(PRODUCTS):
            for many, kinds in ((cases, [(dtype, "highest") for dtype in dtypes]),
                                (FEW * (place == "cuda"), [("float32", "high")])):  # fmt: skip
                problems = [
                    (case, dtype, precision)
                    for case, (dtype, precision) in every(many, kinds)
                    if serves(rung, product, case, dtype, place, precision)
                    # A CPU has float32 for them.
                    and not (place == "cpu" and case in LARGE and dtype in HALVES)
                    and (name != "k0_cpu" or is_compiled(dtype, case.block_size, product))
                ]
                if place == "cuda" and device.SIMULATED:
                    problems = in_turn(problems, shift)
                for case, dtype, precision in problems:
                    label = f"{name}-{product}-{case}-{dtype}" + "-high" * (precision == "high")
                    yield pytest.param(rung, product, case, dtype, place, precision, id=label)


def serves(rung, product, case, dtype, place, precision):
    asked = product, case.block_size, as_dtype(dtype), place, case.batch, precision
    return rung.unsupported(*asked) is None


def in_turn(problems, shift):
    """Of (case, dtype, precision) as many as meet each dtype and, of more than three, every other
    case: the next product has the others, and `test_drawn_products` more of all.
    """
    cases, dtypes = (list(dict.fromkeys(p[axis] for p in problems)) for axis in (0, 1))
    turns, step = min(len(cases), max(len(dtypes), 2)), 1 + (len(cases) > 3)
    mine = [p for p in problems if (cases.index(p[0]) + shift) % step == 0]
    return [p for p in mine if (cases.index(p[0]) // step + dtypes.index(p[1])) % turns == 0]


@pytest.mark.parametrize(("rung", "product", "case", "dtype", "place", "precision"), list(runs()))
def test_rung(rung, product, case, dtype, place, precision):
    if place == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    check_rung(rung, product, case, dtype, place, precision=precision)


def tile_runs():
    cases = [Case(9, 50, 90, size) for size in SIZES] + LARGE * ON_GPU
    for name, product, case, dtype in every(LADDER, PRODUCTS, cases, PLACES["cuda"][1]):
        asked = (product, case.block_size, as_dtype(dtype), "cuda", case.batch, "highest")
        if LADDER[name].unsupported(*asked) is None:
            for tile in range(1, n_tiles(name, *asked[:3], *asked[4:])):
                label = f"{name}-{tile}-{product}-{case}-{dtype}"
                yield pytest.param(LADDER[name], product, case, dtype, tile, id=label)


@pytest.mark.every(2)
@pytest.mark.parametrize(("rung", "product", "case", "dtype", "tile"), list(tile_runs()))
def test_rung_with_its_other_tiles(rung, product, case, dtype, tile):
    check_rung(rung, product, case, dtype, "cuda", tile=tile)


def turned_runs():
    case = Case(batch=37, in_features=70, out_features=100, block_size=32)
    for name, product in every(LADDER, PRODUCTS):
        rung, place = LADDER[name], RUNGS[name]
        operands = [(dtype, "highest") for dtype in PLACES[place][1]] + [("float32", "high")]
        for dtype, precision in operands:
            asked = (product, 32, as_dtype(dtype), place, case.batch, precision)
            if rung.unsupported(*asked) is None:
                label = f"{name}-{product}-{dtype}" + "-high" * (precision == "high")
                yield pytest.param(rung, product, case, dtype, place, precision, id=label)


@pytest.mark.every(11)
@pytest.mark.parametrize(
    ("rung", "product", "case", "dtype", "place", "precision"), list(turned_runs())
)
def test_rung_takes_feature_major_activations(rung, product, case, dtype, place, precision):
    if place == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    check_rung(rung, product, case, dtype, place, precision=precision, feature_major=True)


@pytest.mark.parametrize("name", [name for name in LADDER if name != "k0_reference"])
def test_every_rung_serves_what_it_names(name):
    rung, place = LADDER[name], RUNGS[name]
    if place == "cuda" and name >= "k5" and not serves_ampere():
        pytest.skip("takes a GPU of compute capability 8.0, or the simulator")
    for product, size, dtype in every(PRODUCTS, SIZES, PLACES[place][1]):
        named = size in rung.BLOCK_SIZES and dtype in rung.DTYPES and hasattr(rung, product)
        reasons = [
            rung.unsupported(product, size, as_dtype(dtype), place, 1, precision)
            for precision in PRECISIONS
        ]
        assert (None in reasons) == named, (product, size, dtype, reasons)


def serves_ampere():
    return device.SIMULATED or (device.is_available() and device.compute_capability() >= (8, 0))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("place", PLACES)
def test_every_size_and_dtype_is_served(product, place):
    # The reference takes everything, and is never chosen by itself.
    rungs = [LADDER[name] for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
    for size, dtype in every(SIZES, PLACES[place][1]):
        reasons = [rung.unsupported(product, size, as_dtype(dtype), place) for rung in rungs]
        assert None in reasons, (size, dtype, reasons)


def test_tensor_cores_say_what_they_cannot_take():
    reason = LADDER["k5_tensor_core"].unsupported("forward", 8, np.dtype("float16"), "cuda")
    assert "k7_small_blocks and k8_small_batch take smaller ones" in reason


@pytest.mark.parametrize(
    ("size", "dtype", "place", "reason"),
    [
        (32, "float32", "elsewhere", "runs on"),
        (5, "float32", None, "5"),
        (32, "int32", None, "int32"),
    ],
)
@pytest.mark.parametrize("name", [name for name in LADDER if name != "k0_reference"])
def test_unsupported_says_why(name, size, dtype, place, reason):
    place = place or ("cpu" if name.startswith("k0") else "cuda")
    assert reason in LADDER[name].unsupported("forward", size, as_dtype(dtype), place)


@pytest.mark.parametrize("shape", [(8, 8), (8, 40), (16, 16)])
def test_a_case_has_a_block_unless_none_is_asked_for(shape, rng):
    for density in (0.01, 0.2):
        assert all(Case(1, *shape, 8, density).layout(rng).n_blocks for _ in range(100))
    assert Case(1, *shape, 8, 0).layout(rng).n_blocks == 0


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("fault", ["one wrong", "one hole", "nothing written", "cleared", "marked"])
def test_check_rung_finds_a_fault(product, fault, dtype):
    """The last two write to an operand: to both before they begin, or to the first at the end."""
    eps = float(finfo(dtype).eps)

    def broken(*operands):
        *operands, out, _ = operands
        if fault in ("cleared", "marked"):
            for operand in operands[:2] if fault == "cleared" else ():
                operand[:] = 0
            getattr(k0_reference, product)(*operands, out)
            operands[0][:1] = 3
        elif fault != "nothing written":
            getattr(k0_reference, product)(*operands, out)
            wrong = float(out.flat[0]) * (1 + 4 * eps) + 1e-3
            out.flat[0] = np.nan if fault == "one hole" else wrong

    rung = SimpleNamespace(**{product: broken})
    case = Case(batch=3, in_features=16, out_features=24, block_size=8, density=1)
    with pytest.raises(AssertionError, match=re.escape(f"rung {product} {case}: ")):
        check_rung(rung, product, case, dtype, "cpu")


@pytest.mark.parametrize("product", PRODUCTS)
def test_cpu_gives_the_same_bits_for_any_number_of_threads(product, rng):
    import numba

    case = Case(batch=70, in_features=512, out_features=512, block_size=16, density=0.2)
    layout = case.layout(rng)
    x = rng.standard_normal((case.batch, case.in_features), dtype=np.float32)
    values = rng.standard_normal((layout.n_blocks, 16, 16), dtype=np.float32)
    shape = values.shape if product == "weight_grad" else x.shape
    operands = (x, x) if product == "weight_grad" else (x, values)
    results = []
    before = numba.get_num_threads()
    try:
        for threads in range(1, before + 1):
            numba.set_num_threads(threads)
            out = np.full(shape, np.nan, np.float32)
            getattr(LADDER["k0_cpu"], product)(*operands, layout.index, out)
            results.append(out)
    finally:
        numba.set_num_threads(before)
    assert all((out == results[0]).all() for out in results)


def a_rung_that_is_off(product, by, terms, inexact, eps, accumulator):
    """It adds `by` times what one output may be off, or puts NaN there."""

    def run(*of):
        *operands, index, out, precision = of
        exact = [np.nan_to_num(operand.astype(float)) for operand in operands]
        right, sizes = np.empty(out.shape), np.empty(out.shape)
        getattr(k0_reference, product)(*exact, index, right)
        getattr(k0_reference, product)(*map(abs, exact), index, sizes)
        bound = (terms + 2 + inexact) * accumulator * sizes + eps * abs(right)
        bound += 2.0**-9 * sizes if precision == "high" else 0
        at = np.unravel_index(abs(right).argmax(), out.shape)
        right[at] += by * bound[at]
        out[...] = right

    return SimpleNamespace(**{"__name__": "off", "PRODUCT_ERROR": 5, product: run})


@pytest.mark.parametrize("contiguous", [False, True])
def test_what_a_rung_is_given(contiguous, monkeypatch):
    """Rows with gaps, NaN beyond the edge and in the result, which is to be written whole."""
    monkeypatch.setattr(memory, "_hole", memory.HOLES[0])  # as it is but in tests
    case, seen = Case(batch=3, in_features=10, out_features=15, block_size=4, density=1), []

    def forward(x, values, index, y, precision):
        seen.append((x.flags.c_contiguous, np.isnan(values).any(), np.isnan(y).all()))
        k0_reference.forward(x, np.nan_to_num(values), index, y)
        y[1, 2] = np.nan  # as if it were not written

    rung = SimpleNamespace(__name__="partly", forward=forward)
    with pytest.raises(AssertionError, match=r"1 of 45 outputs are wrong; at \(1, 2\) nan where"):
        check_rung(rung, "forward", case, "float32", "cpu", contiguous=contiguous)
    assert seen == [(contiguous, True, True)]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("dtype", "precision", "inexact", "eps", "accumulator"),
    [
        ("float32", "highest", 5, 2.0**-23, 2.0**-23),
        ("float32", "high", 5, 2.0**-23, 2.0**-23),
        ("float64", "highest", 0, 2.0**-52, 2.0**-52),
        ("float16", "highest", 0, 2.0**-10, 2.0**-23),
    ],
)
def test_what_is_off_by_more_than_its_bound_is_found(
    product, dtype, precision, inexact, eps, accumulator
):
    case = Case(batch=7, in_features=24, out_features=16, block_size=8, density=1)
    terms = {"forward": 24, "input_grad": 16, "weight_grad": 7}[product]
    for by in (0.4, -0.4, 1.7, -1.7, np.nan):
        rung = a_rung_that_is_off(product, by, terms, inexact, eps, accumulator)
        if abs(by) < 1:
            check_rung(rung, product, case, dtype, "cpu", precision=precision)
            continue
        with pytest.raises(AssertionError, match=r"1 of .* outputs are wrong; at .* is right"):
            check_rung(rung, product, case, dtype, "cpu", precision=precision)
