"""Rungs of the convolutions at larger and chosen shapes against dense float64."""

from dataclasses import replace
from importlib import import_module
from itertools import product as every

import numpy as np
import pytest
from conftest import HALVES
from conv_helpers import (
    ConvCase,
    ConvProblem,
    needs_cuda,
    run,
    skip_unless_served,
    why_not,
)

from numbsparse import device, testing
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import matmul
from numbsparse.kernels.conv import PRODUCTS, RUNGS, costs, rung

SMALL = [
    ConvCase(1, (1, 1), 8, 8, 8, (3, 3), padding=1),  # one pixel
    ConvCase(2, (5, 3), 9, 7, 4, (3, 3), padding="same"),
    ConvCase(1, (7,), 4, 12, 4, (3,), stride=2, padding=((2, 0),)),
    ConvCase(3, (4,), 5, 4, 4, (2,), stride=3, padding=1, dilation=2),  # pixels that none sees
    ConvCase(1, (4, 5), 8, 9, 8, (2, 3), stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
    ConvCase(2, (2, 3, 2), 4, 4, 4, (2, 2, 2), padding=1, density=1),
    ConvCase(0, (3, 3), 16, 16, 16, (3, 3), padding=1),
    ConvCase(2, (3, 2), 16, 16, 16, (3, 1), padding="same", density=0),
    ConvCase(1, (3, 3), 16, 17, 16, (3, 3), stride=2, padding=1),
    ConvCase(2, (3, 2), 16, 18, 16, (3, 3), padding=1),
    ConvCase(3, (5, 4), 32, 16, 16, (1, 1), stride=2),
    ConvCase(3, (4,), 32, 24, 16, (2,), padding=((1, 0),), dilation=2),
    ConvCase(2, (2, 3), 33, 32, 32, (1, 2), padding="same", density=1),
]
LARGE = [
    ConvCase(3, (13, 17), 96, 64, 32, (3, 3), padding="same"),
    ConvCase(2, (31, 9), 64, 100, 16, (5, 5), stride=2, padding=2),
    ConvCase(65, (1, 1), 64, 64, 32, (3, 3), padding=1),
    ConvCase(40, (4, 4), 70, 64, 32, (3, 3), padding="same"),
    ConvCase(2, (300,), 130, 64, 64, (7,), padding="same", dilation=4),
    ConvCase(1, (9, 8, 7), 32, 48, 16, (3, 3, 3), stride=(1, 2, 1), padding=1),
    ConvCase(1, (20, 21), 64, 64, 32, (3, 3), padding=16, dilation=16),
    ConvCase(1, (20, 20), 128, 128, 64, (4, 4), stride=2, padding=1, density=1),
    ConvCase(7, (5, 6), 20, 20, 4, (3, 3), padding=((2, 0), (1, 1))),
]
WHOLE = [  # mostly tiles of 8 x 8
    ConvCase(3, (17, 15), 256, 136, 128, (3, 3), padding=1),
    ConvCase(5, (16, 24), 64, 48, 32, (3, 3), padding=2, dilation=2),
    ConvCase(2, (300,), 32, 40, 16, (5,), padding="same"),
    ConvCase(2, (5, 16, 8), 64, 64, 64, (3, 2, 3), padding=1),
    ConvCase(4, (32, 32), 32, 64, 32, (4, 4), stride=2, padding=1),
]
ON_GPU = device.is_available() and not device.SIMULATED
DRAWN = ("k0_cpu", "k1_naive", "k5_small_blocks")
# A simulated GPU thread is an operating-system thread: the large cases are for real GPUs and CPUs.
PLACES = {
    "cpu": (SMALL + LARGE, ["float32", "float64", *HALVES]),
    "cuda": (SMALL + (LARGE + WHOLE) * ON_GPU, ["float32", *HALVES]),
}


def runs():
    for (name, place), product in every(RUNGS.items(), PRODUCTS):
        cases, dtypes = PLACES[place]
        for case, dtype in every(cases, dtypes):
            reason = why_not(name, product, case, dtype)
            slow = name == "k0_reference" and (case in LARGE or dtype != "float64")
            if not ON_GPU:  # small cases are drawn too, in test_drawn_conv
                slow |= name in DRAWN and case in SMALL
                slow |= dtype == "float64" and case in LARGE and case not in LARGE[::3]
                slow |= dtype == "bfloat16" and (place == "cuda" or case not in LARGE[1::3])
                slow |= dtype == "float16" and place == "cpu" and case not in LARGE[2::3]
                slow |= dtype == "float32" and place == "cuda"
            if reason is None and not slow:
                label = f"{name}-{product}-{case}-{dtype}"
                yield pytest.param(name, product, case, dtype, id=label)


@pytest.mark.parametrize(("name", "product", "case", "dtype"), list(runs()))
def test_rung(name, product, case, dtype):
    place = RUNGS[name]
    if place == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    problem = ConvProblem(case, dtype)
    got = run(name, product, problem, place)
    expected, bound = problem.exact(product), problem.bound(product, dtype)
    wrong = ~(abs(got.astype(np.float64) - expected) <= bound)  # NaN is wrong
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} are wrong, first at {np.argwhere(wrong)[0]}: "
        f"{got[wrong][0]} where {expected[wrong][0]} +- {bound[wrong][0]} is right"
    )


TENSOR_CORE = ConvCase(2, (3, 2), 16, 18, 16, (3, 3), padding=1)
MERGED = ConvCase(2, (3, 4), 24, 18, 8, (2, 3), stride=2, padding=1)
PART_OF_A_TILE = ConvCase(2, (3, 2), 16, 24, 16, (3, 3), padding=1)
UNEVEN = ConvCase(2, (4, 19), 16, 24, 8, (3, 3), padding=1)  # boxes of 4 x 7 end beyond it
WHOLE_TILE = ConvCase(2, (8, 8), 16, 24, 16, (3, 1), padding=((1, 1), (0, 0)))
SIXTEEN_BIT = ["k3_tensor_core", "k4_wgmma", "k6_strips"]
LINES = [("float32", "forward"), ("bfloat16", "forward"), ("float16", "input_grad")]


@needs_cuda
@pytest.mark.parametrize("product", PRODUCTS)
def test_high_rounds_only_operands_of_float32(product):
    problem = ConvProblem(TENSOR_CORE)
    got, exact = (run("k2_unfolded", product, problem, "cuda", "high"), problem.exact(product))
    error, magnitude = abs(got - exact), problem.exact(product, magnitude=True)
    assert (error <= problem.bound(product, "float32") + 2.0**-9 * magnitude).all()
    assert not (error <= problem.bound(product, "float32")).all()


@needs_cuda
@pytest.mark.filterwarnings("ignore:.*(invalid value|overflow) encountered")
@pytest.mark.parametrize(
    ("name", "case", "dtype", "product"),
    [
        *(("k2_unfolded", TENSOR_CORE, "float32", product) for product in PRODUCTS[:2]),
        *(("k5_small_blocks", MERGED, dtype, product) for dtype, product in LINES),
        *(("k4_wgmma", PART_OF_A_TILE, dtype, "weight_grad") for dtype in HALVES),
        ("k4_wgmma", WHOLE_TILE, "float32", "weight_grad"),
        *(
            ("k6_strips", replace(MERGED, out_features=24, stride=1), "float32", product)
            for product in PRODUCTS
        ),
        ("k6_strips", UNEVEN, "bfloat16", "weight_grad"),
    ],
)
def test_infinities_are_those_of_plain_sums(name, case, dtype, product):
    problem = ConvProblem(case, dtype)
    problem.x[0, 1, [1, -1], 3] = np.inf
    problem.dy[1, 0, 0, [5, 17]] = -np.inf
    got, expected = (run(of, product, problem, "cuda") for of in (name, "k1_naive"))
    infinite = np.isinf(expected)
    assert infinite.any()
    np.testing.assert_array_equal(got[infinite], expected[infinite])
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))


PIECES = ConvCase(2, (16, 24), 16, 16, 16, (3, 3), padding="same")
if not ON_GPU:
    PIECES = ConvCase(1, (6, 17), 16, 16, 16, (1, 3), padding="same")


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("pieces", [3, 10])  # also more than are read at once
def test_pieces_of_a_weight_grad_add_up(pieces, monkeypatch):
    skip_unless_served("k4_wgmma", "weight_grad", PIECES, "float16")
    module = import_module("numbsparse.kernels.conv.k4_wgmma.weight_grad")
    cut = []
    monkeypatch.setattr(module, "pieces_of", lambda _, tiles, *__: cut.append(tiles) or pieces)
    problem, got = ConvProblem(PIECES, "float16"), []

    def weight_grad():
        got.append(run("k4_wgmma", "weight_grad", problem, "cuda").astype(np.float64))

    if device.SIMULATED:
        assert not testing.races(weight_grad)
    else:
        weight_grad()
    assert min(cut) >= 3
    error = abs(got[0] - problem.exact("weight_grad"))
    assert (error <= problem.bound("weight_grad", "float16")).all()


@needs_cuda
@pytest.mark.parametrize("name", ["k2_unfolded", "k4_wgmma"])
def test_weight_grad_of_more_images_than_pixels(name):
    case = ConvCase(70, (2,), 16, 16, 16, (1,), density=1)
    skip_unless_served(name, "weight_grad", case, "float16")
    problem = ConvProblem(case, "float16")
    got = run(name, "weight_grad", problem, "cuda").astype(np.float64)
    assert (
        abs(got - problem.exact("weight_grad")) <= problem.bound("weight_grad", "float16")
    ).all()


@needs_cuda
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float16") for name in (*SIXTEEN_BIT, "k5_small_blocks")),
        ("k4_wgmma", "float32"),
    ],
)
@pytest.mark.usefixtures("no_garbage")
def test_nothing_races(name, product, dtype, monkeypatch):
    if not device.SIMULATED:
        pytest.skip("the simulator looks at accesses")
    monkeypatch.setattr(rung("k5_small_blocks"), "OTHERS", ("k3_tensor_core", "k4_wgmma"))
    size = 8 if name == "k5_small_blocks" else 16
    case = ConvCase(2, (3, 8), 16 if size == 8 else 32, 16, size, (2, 2), padding=1)
    skip_unless_served(name, product, case, dtype)
    problem = ConvProblem(case, dtype)
    assert not testing.races(lambda: run(name, product, problem, "cuda"))


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_blocks_of_threads_that_take_several_lines(product, monkeypatch):
    """They begin each with sums of zero; usually a line is enough for the simulator."""
    case = ConvCase(2, (5, 4), 64, 50, 16, (2, 1), padding=1, density=1)
    skip_unless_served("k3_tensor_core", product, case, "float16")
    module = import_module("numbsparse.kernels.conv.k3_tensor_core")
    monkeypatch.setattr(module, "ENOUGH", 2)
    problem = ConvProblem(case, "float16")
    got = run("k3_tensor_core", product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, "float16")).all()


@needs_cuda
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "case",
    [
        ConvCase(1, (3, 9), 128, 128, 128, (1, 2), padding=1, density=1),
        ConvCase(1, (6, 4), 32, 40, 16, (3, 3), padding=1),
        ConvCase(2, (2, 3, 4), 16, 16, 16, (2, 1, 2)),
    ],
    ids=str,
)
def test_tiles_of_8_x_8(product, case):
    """What takes other ways than images whose blocks are small: parts, an edge of y, depth."""
    skip_unless_served("k4_wgmma", product, case, "float16")
    problem = ConvProblem(case, "float16")
    got = run("k4_wgmma", product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, "float16")).all()


STRIDED = [
    ConvCase(1, (5, 4), 16, 16, 16, (3, 3), stride=2, padding=1),
    ConvCase(1, (3, 3), 16, 16, 16, (1, 1), stride=2),  # pixels that no tap sees
]


@needs_cuda
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("case", STRIDED, ids=str)
def test_pixels_of_each_residue_alone(product, case):
    skip_unless_served("k4_wgmma", product, case, "float16")
    problem = ConvProblem(case, "float16")
    got = run("k4_wgmma", product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, "float16")).all()


@needs_cuda
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["k2_unfolded", "k6_strips"])
@pytest.mark.parametrize(
    "case",
    [replace(case, batch=3, block_size=size) for size in (8, 16) for case in STRIDED],
    ids=str,
)
def test_squares_of_pixels(name, case, dtype):
    """Stored where they belong, or copied there; zeros where no tap reaches a pixel."""
    skip_unless_served(name, "input_grad", case, dtype)
    problem = ConvProblem(case, dtype)
    got = run(name, "input_grad", problem, "cuda").astype(np.float64)
    bound = problem.bound("input_grad", dtype)
    assert (abs(got - problem.exact("input_grad")) <= bound).all()


@needs_cuda
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("taps", [3, 1])
def test_what_no_block_multiplies_is_not_unfolded(product, taps, monkeypatch):
    """Nor what outputs see as it is: of one tap, at a stride, dy."""
    k2, columns = import_module("numbsparse.kernels.conv.k2_unfolded"), []

    def unfolded(*of):
        columns.append((made := made_by(*of)).shape[1])
        return made

    made_by = k2.unfolded
    monkeypatch.setattr(k2, "unfolded", unfolded)
    case = ConvCase(1, (3, 3), 64, 48, 16, (taps, taps), 2, taps // 2, density=0.3)
    problem = ConvProblem(case)
    error = abs(run("k2_unfolded", product, problem, "cuda") - problem.exact(product))
    assert (error <= problem.bound(product, "float32")).all()
    tap, row = np.divmod(problem.layout.index.block_rows, 4)
    seen = (tap, row) if product != "input_grad" else (tap, problem.layout.index.block_columns)
    if product == "input_grad":  # taps of a residue see by the same offsets, two along each axis
        seen = ((tap // 3 == 2) * 2 + (tap % 3 == 2), seen[1])
    expected = len(set(zip(*(side.tolist() for side in seen), strict=True))) * 16
    assert columns == ([] if (taps, product) == (1, "input_grad") else [expected])


@needs_cuda
@pytest.mark.parametrize("by", costs.MULTIPLIERS)
@pytest.mark.parametrize("stride", [1, 2])
def test_taps_that_see_no_pixel(by, stride):
    """Whatever multiplies what is unfolded: some rungs take all blocks that there are."""
    case = ConvCase(1, (1, 1), 64, 64, 32, (3, 3), stride, 1, density=0.9)
    how = as_dtype("float32"), "cuda", 1, "highest"
    if reason := matmul.rung(by).unsupported("input_grad", case.block_size, *how):
        pytest.skip(reason)
    problem = ConvProblem(case)
    error = abs(
        run(f"k2_unfolded/{by}", "input_grad", problem, "cuda") - problem.exact("input_grad")
    )
    assert (error <= problem.bound("input_grad", "float32")).all()


@needs_cuda
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("k1_naive", 16),
        ("k2_unfolded", 16),
        ("k3_tensor_core", 16),
        ("k4_wgmma", 16),
        ("k5_small_blocks", 8),
    ],
)
def test_single_products_keep_to_what_their_rung_says(rng, name, size):
    product = "forward" if name == "k4_wgmma" else "weight_grad"
    pixels = 16 if product == "forward" else 1
    problem = ConvProblem(ConvCase(1, (pixels,), 16, 16, size, (1,), density=1))
    skip_unless_served(name, product, problem.case, "float32")
    for operand in (problem.x, problem.dy, problem.w.values, problem.dense):
        # Just over a power of two, where the errors of two tf32 are the largest part of an operand.
        operand[...] = 1 + rng.integers(2**12, size=operand.shape) / 2.0**23
    if product == "forward":  # one term of its sum is left
        problem.dense[...] = problem.w.values
        problem.x[..., 1:] = 0
    got, exact = run(name, product, problem, "cuda"), problem.exact(product)
    off = abs(got - exact).max() / 2.0**-23
    error = getattr(rung(name), "PRODUCT_ERROR", 0)
    assert error / 3 < off <= error + 1  # that much is needed, and one rounding to float32


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_three_axes_of_blocks_of_16(name, product):
    """Padded along the first of them: boxes that begin before the image."""
    case = ConvCase(1, (3, 2, 4), 16, 16, 16, (3, 1, 2), padding=((1, 1), (0, 0), (1, 0)))
    skip_unless_served(name, product, case, "float16")
    problem = ConvProblem(case, "float16")
    got = run(name, product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, "float16")).all()


@needs_cuda
@pytest.mark.pairs
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "case",
    [
        ConvCase(2, (2, 3, 4), 32, 48, 16, (2, 1, 2), padding=((1, 0), (0, 0), (0, 1))),
        ConvCase(1, (3, 9), 64, 64, 64, (1, 2), padding=1, density=1),
    ],
    ids=str,
)
def test_float32_of_whole_blocks(case, product, precision):
    """By tensor cores: the three products of a split, or one of tf32."""
    skip_unless_served("k4_wgmma", product, case, "float32")
    problem = ConvProblem(case)
    got = run("k4_wgmma", product, problem, "cuda", precision).astype(np.float64)
    bound = problem.bound(product, "float32")
    if precision == "high":
        bound = bound + 2.0**-9 * problem.exact(product, magnitude=True)
    assert (abs(got - problem.exact(product)) <= bound).all()


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("number", range(3))
def test_every_tile_of_pixels_on_the_cpu(size, number, monkeypatch):
    """Each shape where it is not the cheapest too."""
    lines = import_module("numbsparse.kernels.conv.k0_cpu.lines")
    shapes = lines.shapes_of(size, np.dtype("float32"))
    one = shapes[number % len(shapes)]
    monkeypatch.setattr(lines, "shapes_of", lambda size, dtype: (one,))
    features = 2 * size + 1, 3 * size - 1
    for batch, space in ((1, (7, 8)), (3, (4, 11)), (2, (3, 27))):
        problem = ConvProblem(ConvCase(batch, space, *features, size, (3, 3), padding=1))
        for product in PRODUCTS[:2]:
            got = run("k0_cpu", product, problem, "cpu").astype(np.float64)
            bound = problem.bound(product, "float32")
            assert (abs(got - problem.exact(product)) <= bound).all()


@pytest.mark.parametrize("stride", [1, 2])
def test_few_outputs_on_the_cpu(stride):
    """Below, at and above as many as are unfolded; of one tap always, beside the image too."""
    few = import_module("numbsparse.kernels.conv.k0_cpu.unfolded").FEW
    side = stride * 16
    for batch, taps, padding in ((1, 3, 1), (few // 256, 3, 1), (few // 256 + 1, 3, 1), (1, 1, 1)):
        space = (side, side)
        case = ConvCase(batch, space, 32, 48, 16, (taps, taps), stride=stride, padding=padding)
        for dtype in ("float32", "float64"):
            problem = ConvProblem(case, dtype)
            for product in PRODUCTS:
                got = run("k0_cpu", product, problem, "cpu").astype(np.float64)
                bound = problem.bound(product, dtype)
                assert (abs(got - problem.exact(product)) <= bound).all()


def test_cpu_gives_the_same_bits_for_any_number_of_threads():
    import numba

    problem = ConvProblem(LARGE[0])
    before = numba.get_num_threads()
    try:
        for product in PRODUCTS:
            results = []
            for threads in range(1, before + 1):
                numba.set_num_threads(threads)
                results.append(run("k0_cpu", product, problem, "cpu"))
            assert all((result == results[0]).all() for result in results)
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_size_and_dtype_is_served(product):
    for place, sizes in (("cpu", (4, 8, 16, 32, 64, 128)), ("cuda", (4, 5, 8, 16, 32, 64, 128))):
        rungs = [rung(name) for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
        for size, dtype in every(sizes, PLACES[place][1]):
            reasons = [of.unsupported(product, size, as_dtype(dtype), place) for of in rungs]
            assert None in reasons, (size, dtype, reasons)
