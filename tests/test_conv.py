"""Rungs of the convolutions at larger and chosen shapes against dense float64."""

import re
from dataclasses import replace
from importlib import import_module
from itertools import product as every

import numpy as np
import pytest
from conftest import HALVES
from conv_helpers import ConvCase, ConvProblem

import numbsparse as ns
from numbsparse import device, ops, testing
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import matmul
from numbsparse.kernels.conv import PRODUCTS, RUNGS, chosen, costs, function_of, rung

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


def why_not(name, product, case, dtype):
    """Why a rung does not serve the case, or None."""
    how = case.block_size, as_dtype(dtype), RUNGS[name], case.batch, "highest"
    call = case.window, case.in_features, case.out_features
    return rung(name).unsupported(product, *how, *call)


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


def skip_unless_served(name, product, case, dtype):
    if (reason := why_not(name, product, case, dtype)) is not None:
        pytest.skip(reason)


def run(name, product, problem, place, precision="highest"):
    """A product of a rung into an output that is NaN before."""
    case, w = problem.case, problem.w
    x, dy = (
        a.reshape(case.batch, np.prod(a.shape[1:-1]), a.shape[-1]) for a in (problem.x, problem.dy)
    )
    first, second, out = {
        "forward": (x, w.values, problem.dy),
        "input_grad": (dy, w.values, problem.x),
        "weight_grad": (x, dy, w.values),
    }[product]
    shape = out.shape if out is w.values else (dy if out is problem.dy else x).shape
    blank = device.memory.hole(shape, out.dtype)
    send = device.to_device if place == "cuda" else np.ascontiguousarray
    there = send(blank)
    index = ops.index_beside(w.layout, there)
    compute = function_of(name, product)
    compute(send(first), send(second), index, case.window, there, precision)
    result = there.numpy() if place == "cuda" else there
    return result.reshape(out.shape)


needs_cuda = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")
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


def of_features(of_in, of_out, n_in, n_out):
    return rf"multiples of \[{of_in}, {of_out}\] features in \w+, got \[{n_in}, {n_out}\]"


FAR = ConvCase(1, (5, 9), 16, 16, 16, (3, 3), stride=(2, 5), padding=1)
REFUSED = [
    ("forward", FAR, "float16", r"a stride of up to 4 in forward, got \(1, 2, 5\)"),
    ("weight_grad", FAR, "bfloat16", r"a stride of up to 4 in weight_grad, got \(1, 2, 5\)"),
    ("weight_grad", ConvCase(1, (3, 2), 16, 15, 16, (3, 1)), "float32", of_features(8, 8, 16, 15)),
    ("weight_grad", ConvCase(1, (5, 4), 9, 16, 16, (3, 3)), "float16", of_features(8, 8, 9, 16)),
    ("forward", ConvCase(1, (5, 4), 24, 16, 16, (3, 3)), "float16", of_features(16, 8, 24, 16)),
    ("forward", ConvCase(1, (5, 4), 16, 18, 16, (3, 3)), "float16", of_features(16, 8, 16, 18)),
    ("input_grad", ConvCase(1, (5, 4), 16, 24, 16, (3, 3)), "float32", of_features(16, 16, 16, 24)),
    ("input_grad", ConvCase(1, (5, 4), 24, 16, 16, (3, 3)), "float32", of_features(16, 16, 24, 16)),
    ("input_grad", ConvCase(1, (5, 4), 18, 16, 16, (3, 3)), "float16", of_features(8, 16, 18, 16)),
]


@needs_cuda
@pytest.mark.parametrize(("product", "case", "dtype", "says"), REFUSED)
def test_auto_takes_another_rung_where_one_says_why_it_does_not_serve(product, case, dtype, says):
    if reason := rung("k4_wgmma").unsupported("forward", 16, as_dtype("float16"), "cuda"):
        pytest.skip(reason)
    assert re.search(f"^k4_wgmma .*{says}$", why_not("k4_wgmma", product, case, dtype))
    p, how = ConvProblem(case, dtype), case.sizes
    call = {
        "forward": lambda **which: ns.conv(p.x, p.w.to("cuda"), **how, **which),
        "input_grad": lambda **which: ns.conv_transpose(
            p.dy, p.w.to("cuda"), out_features=case.in_features, **how, **which
        ),
        "weight_grad": lambda **which: ns.conv_weight_grad(
            device.to_device(p.x), device.to_device(p.dy), p.w, **how, **which
        ).values.numpy(),
    }[product]
    with pytest.raises(ValueError, match=says):
        call(kernel="k4_wgmma")
    others = ("k2_unfolded", "k3_tensor_core")  # these are few outputs: the first that serves
    other = next(name for name in others if why_not(name, product, case, dtype) is None)
    np.testing.assert_array_equal(call(), call(kernel=other))


@needs_cuda
@pytest.mark.parametrize(
    ("product", "size", "batch", "best"),
    [
        ("forward", 64, 1, "k2_unfolded"),
        ("forward", 8, 64, "k6_strips"),
        ("input_grad", 64, 256, "k4_wgmma"),
        ("weight_grad", 8, 64, "k6_strips"),
        ("weight_grad", 32, 1, "k2_unfolded"),
    ],
)
def test_which_rung_is_best_depends_on_the_number_of_outputs(product, size, batch, best):
    case = ConvCase(batch, (8, 8), 512, 512, size, (3, 3), padding=1)
    skip_unless_served("k4_wgmma", product, replace(case, block_size=16), "float16")
    names = [name for name, place in RUNGS.items() if place == "cuda"]
    call = case.window, case.in_features, case.out_features
    how = product, size, as_dtype("float16"), "cuda", batch, "highest"
    of = chosen(names, 9 * (512 // size) ** 2 // 10, *how, *call)
    assert of is rung(best)


@needs_cuda
@pytest.mark.parametrize(
    ("size", "batch", "side", "features", "taps", "density", "best"),
    [
        (16, 32, 16, (64, 512), 3, 0.041, "k4_wgmma"),
        (16, 64, 64, (64, 512), 3, 0.188, "k6_strips"),
        (8, 16, 56, (256, 512), 5, 0.131, "k6_strips"),
        (32, 64, 28, (256, 512), 3, 0.089, "k4_wgmma"),
        (32, 32, 32, (256, 64), 3, 0.123, "k4_wgmma"),
    ],
)
def test_the_best_rung_of_drawn_input_gradients_of_stride_2(
    size, batch, side, features, taps, density, best
):
    """As an H200 timed them."""
    skip_unless_served("k4_wgmma", "input_grad", ConvCase(1, (8, 8), 16, 16, 16, (3, 3)), "float16")
    case = ConvCase(batch, (side, side), *features, size, (taps, taps), 2, taps // 2)
    names = [name for name, place in RUNGS.items() if place == "cuda"]
    how = "input_grad", size, as_dtype("float16"), "cuda", batch, "highest"
    n_blocks = int(density * taps**2 * np.prod(features) / size**2)
    assert chosen(names, n_blocks, *how, case.window, *features) is rung(best)


@needs_cuda
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("batch", "side", "features", "density", "best"),
    [(16, 28, (256, 256), 0.1, "k6_strips"), (1, 9, (736, 224), 0.042, "k2_unfolded")],
)
def test_the_best_rung_of_float32_in_blocks_of_8(batch, side, features, density, best, product):
    """As an H200 timed them."""
    case = ConvCase(batch, (side, side), *features, 8, (3, 3), padding=1)
    skip_unless_served("k6_strips", product, case, "float32")
    names = [name for name, place in RUNGS.items() if place == "cuda"]
    how = product, 8, as_dtype("float32"), "cuda", batch, "high"
    n_blocks = int(density * 9 * np.prod(features) / 64)
    assert chosen(names, n_blocks, *how, case.window, *features) is rung(best)


def test_a_time_is_a_sum_of_what_counts(monkeypatch):
    of = "input_grad", 16, as_dtype("bfloat16"), "highest", 1000, 32, 64, 10
    counts = [1, 1000 * 2560 / 1e9, 2560 / 64e3, 2 * 32_000 / 1e6, 2 * (64_000 + 2560) / 1e6]
    shared = [*counts[:2], 2560 / 64e3 / 8, *counts[3:]]  # by 8: there are 16 tiles of 64 outputs
    with_gaps = [*counts[:4], 2 * (128_000 + 2560) / 1e6]  # zeros between pixels
    copied = 2 * (64_000 + 64_000 + 2560) / 1e6  # into the places of residues
    for name, square, of_rung in (
        ("k4_wgmma", 0, counts),
        ("k4_wgmma", 64, counts),
        ("k4_wgmma", 128, with_gaps),
        ("k6_strips", 0, shared),
        ("k6_strips", 64, shared),
        ("k2_unfolded/k7_small_blocks", 64, [1.5, *shared[1:4], copied]),
        ("k2_unfolded/k6_hopper", 64, [1.5, *counts[1:4], copied]),
    ):
        for place, count in enumerate(of_rung):
            one = {f"{name} lines float16 16": np.eye(5)[place]}
            monkeypatch.setattr(costs, "measured", lambda one=one: one)
            assert costs.microseconds(name, *of, square) == pytest.approx(count)
    assert costs.microseconds("k3_tensor_core", *of, 64) == np.inf  # not measured: taken last
    many = *of[:4], 10_000, *of[5:], 0, 20  # tiles, whose taps share boxes of so many features
    for features, seen in ((64, 20), (256, 20), (257, 32)):
        one = {"k6_strips lines float16 16": np.eye(5)[3]}
        monkeypatch.setattr(costs, "measured", lambda one=one: one)
        sizes = *many[:6], features, *many[7:]
        assert costs.microseconds("k6_strips", *sizes) == pytest.approx(2 * 10_000 * seen / 1e6)
    monkeypatch.undo()
    of = "weight_grad", 128, as_dtype("float32"), "high"  # which are taken as several of 64
    assert 0 < costs.microseconds("k2_unfolded/k6_hopper", *of, 1000, 128, 128, 1, 0) < np.inf


PIXELS = [
    ConvCase(2, (5, 13), 16, 24, 8, (2, 3), padding=1),  # a tile of 64 ends within an image
    ConvCase(5, (4, 4), 24, 40, 8, (2, 3), padding=((0, 1), (2, 0))),  # and holds several
    ConvCase(1, (2, 3, 6), 48, 16, 16, (3, 1, 2), padding=1, dilation=(1, 2, 1)),
    ConvCase(1, (70,), 16, 16, 8, (3,), padding="same"),  # and is a part of a line
    ConvCase(7, (3,), 32, 16, 8, (5,), padding=2),  # the last stage of images is not full
    ConvCase(1, (19, 17), 16, 8, 8, (2, 2), stride=2, padding=1),
    ConvCase(2, (4, 3), 64, 72, 8, (2, 1), padding=((1, 0), (0, 0))),  # in groups of 64, and of 32
    ConvCase(2, (3, 5), 22, 16, 8, (3, 1), stride=(2, 1), padding=1),  # pixels that none sees
    ConvCase(1, (4, 8), 8, 136, 8, (1, 1), density=0.2),  # more groups of dy than of x
]


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
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("case", PIXELS, ids=str)
def test_rows_that_are_found_in_images(case, product, dtype):
    skip_unless_served("k6_strips", product, case, dtype)
    problem = ConvProblem(case, dtype)
    got = run("k6_strips", product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, dtype)).all()


SHARED = [
    ConvCase(2, (9, 8), 40, 24, 8, (4, 4), stride=2, padding=(2, 1)),  # a box for four taps
    ConvCase(1, (4, 5, 9), 32, 16, 16, (3, 2, 3), padding=1),  # two for 18
    ConvCase(1, (10, 9), 128, 24, 8, (5, 1), padding=1, dilation=(2, 1)),
]
NO_ROOM = [  # for so many steps
    ("float16", "forward", ConvCase(1, (5, 5), 64, 128, 8, (3, 3), padding=1, density=1)),
    ("float32", "forward", ConvCase(1, (5, 5), 32, 128, 8, (3, 3), padding=1, density=1)),
]


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "product", "case"),
    [*every(["float16", "float32"], PRODUCTS[:2], SHARED), *NO_ROOM],
    ids=str,
)
def test_taps_that_share_boxes(dtype, product, case, monkeypatch):
    """However few tiles there are."""
    skip_unless_served("k6_strips", product, case, dtype)
    monkeypatch.setattr(rung("k6_strips"), "is_shared", lambda *_: True)
    rung("k6_strips").tile_and_boxes.cache_clear()
    problem = ConvProblem(case, dtype)
    got = run("k6_strips", product, problem, "cuda").astype(np.float64)
    assert (abs(got - problem.exact(product)) <= problem.bound(product, dtype)).all()
    rung("k6_strips").tile_and_boxes.cache_clear()


@needs_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        ConvCase(1, (8, 8), 64, 40, 8, (3, 3), padding=1, density=0.9),  # tiles of 4 x 8
        ConvCase(1, (4, 16), 72, 72, 8, (3, 3), padding=1),  # two groups of features
        ConvCase(4, (2, 8), 40, 24, 8, (3, 2), padding=((1, 1), (1, 0))),  # of two images
        ConvCase(1, (8, 8), 80, 32, 16, (5, 5), padding=2),  # three boxes
        ConvCase(1, (2, 2, 8), 32, 16, 16, (2, 3, 3), padding=((0, 1), (1, 1), (1, 1))),
        ConvCase(1, (4, 10), 16, 48, 16, (3, 3), padding=((1, 1), (0, 0))),  # none beyond the sides
        ConvCase(1, (4, 8), 32, 32, 8, (3, 3), padding=2, dilation=2),
    ],
    ids=str,
)
def test_taps_share_boxes_in_weight_gradients(case, dtype):
    skip_unless_served("k6_strips", "weight_grad", case, dtype)
    of = case.window.whole("weight_grad")
    tile, boxes = rung("k6_strips").boxes_of_weight_grad(of, case.batch, 2, 96)
    assert boxes is not None
    assert np.prod(tile) == 32
    problem = ConvProblem(case, dtype)
    got = run("k6_strips", "weight_grad", problem, "cuda").astype(np.float64)
    error = abs(got - problem.exact("weight_grad"))
    assert (error <= problem.bound("weight_grad", dtype)).all()


def test_taps_share_no_boxes_where_rows_of_a_tile_would_share_banks():
    """Or at a stride, or of float32, or where a box is no smaller than what its taps see."""
    found = rung("k6_strips").boxes_of_weight_grad
    for image, taps, stride, item, shared in (
        *(((56, 56), 3, 1, 2, True), ((28, 28), 3, 1, 2, False), ((14, 14), 3, 1, 2, False)),
        *(((56, 56), 3, 2, 2, False), ((56, 56), 3, 1, 4, False), ((56, 56), 1, 1, 2, False)),
    ):
        case = ConvCase(1, image, 16, 16, 8, (taps, taps), stride, taps // 2)
        assert (found(case.window.whole("weight_grad"), 8, item, 64)[1] is not None) == shared
        assert found(case.window.whole("weight_grad"), 8, item, 512) == (None, None)
    apart = ConvCase(1, (64, 64), 16, 16, 8, (2, 2), 1, 8, dilation=16)
    assert found(apart.window.whole("weight_grad"), 8, 2, 64) == (None, None)


@needs_cuda
@pytest.mark.parametrize(
    ("product", "case", "says"),
    [
        ("input_grad", ConvCase(1, (9,), 16, 16, 8, (3,), stride=3), "a stride of 1 or 2"),
        ("forward", ConvCase(1, (9, 9), 16, 16, 8, (3, 3), stride=(1, 2)), "a stride of 1 or 2"),
        ("input_grad", ConvCase(1, (9,), 16, 20, 8, (3,)), r"multiples of 8 features in \w+, got"),
        ("forward", ConvCase(1, (9,), 16, 20, 8, (3,)), r"got \(16, 20\)"),
        ("forward", ConvCase(1, (200,), 16, 16, 8, (3,), dilation=65), "less far apart"),
    ],
)
def test_images_whose_rows_are_not_found(product, case, says):
    if reason := rung("k6_strips").unsupported(product, 8, as_dtype("float16"), "cuda"):
        pytest.skip(reason)
    assert re.search(says, why_not("k6_strips", product, case, "float16"))


@needs_cuda
def test_images_that_tiles_of_8_x_8_would_fill_badly_are_refused(monkeypatch):
    if reason := rung("k4_wgmma").unsupported("forward", 16, as_dtype("float16"), "cuda"):
        pytest.skip(reason)
    if not device.SIMULATED:
        pytest.skip("a card's tiles have more rows")
    monkeypatch.setattr(import_module("numbsparse.kernels.conv.window"), "MOST_WASTE", 1.5)
    for product in PRODUCTS:
        for side, served in ((8, True), (7, True), (9, False), (5, False), (14, True)):
            case = ConvCase(64, (side, side), 16, 16, 16, (3, 3), padding=1)
            reason = why_not("k4_wgmma", product, case, "float16")
            assert (reason is None) == served, (product, side, reason)
            assert served or "mostly fill tiles of 8 x 8" in reason
            if product != "weight_grad":
                assert why_not("k4_wgmma", product, case, "float32") is None


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
