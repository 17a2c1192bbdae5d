"""Which rung of the convolutions `auto` takes, and what each refuses."""

import re
from dataclasses import replace
from importlib import import_module
from math import exp, log, sqrt

import numpy as np
import pytest
from conv_helpers import ConvCase, ConvProblem, needs_cuda, skip_unless_served, why_not

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.conv import PRODUCTS, RUNGS, chosen, costs, rung


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
    longest = 2 * 16 / 1e3  # both blocks that are seen, by which all lines could be filled
    counts = [1, 1000 * 2560 / 1e9, 2560 / 64e3, 2 * 32_000 / 1e6, 2 * (64_000 + 2560) / 1e6]
    counts.append(longest)
    with_gaps = [*counts[:4], 2 * (128_000 + 2560) / 1e6, longest]  # zeros between pixels
    copied = 2 * (64_000 + 64_000 + 2560) / 1e6  # into the places of residues
    copied = [1.5, *counts[1:3], counts[3] * (1 - exp(-5)), copied, longest]  # where blocks are
    for name, square, of_rung in (
        ("k4_wgmma", 0, counts),
        ("k4_wgmma", 64, counts),
        ("k4_wgmma", 128, with_gaps),
        ("k6_strips", 0, counts),
        ("k6_strips", 64, counts),
        ("k2_unfolded/k7_small_blocks", 64, copied),
        ("k2_unfolded/k6_hopper", 64, copied),
    ):
        for place, count in enumerate(of_rung):
            one = {f"{name} lines float16 16": np.eye(6)[place]}
            monkeypatch.setattr(costs, "measured", lambda one=one: one)
            assert costs.microseconds(name, *of, square) == pytest.approx(count)
    assert costs.microseconds("k3_tensor_core", *of, 64) == np.inf  # not measured: taken last
    many = *of[:4], 10_000, *of[5:], 0, 20  # tiles, whose taps share boxes of so many features
    for features, seen in ((64, 20), (256, 20), (257, 32)):
        one = {"k6_strips lines float16 16": np.eye(6)[3]}
        monkeypatch.setattr(costs, "measured", lambda one=one: one)
        sizes = *many[:6], features, *many[7:]
        assert costs.microseconds("k6_strips", *sizes) == pytest.approx(2 * 10_000 * seen / 1e6)
    of = "forward", 16, as_dtype("float16"), 20 * 64, 800, 16 * 64, 160, 0  # 320 tiles: 3 rounds
    assert costs.counts("k4_wgmma", *of)[5] == pytest.approx(
        3 * 16 * (2.5 + sqrt(5 * log(64))) / 1e3
    )
    of = "weight_grad", 16, as_dtype("float16"), 8192, 64, 64  # of few blocks the sums are cut
    for n_blocks, part in ((1, 1 / 8), (66, 1 / 2), (132, 1), (133, 2)):
        assert costs.counts("k4_wgmma", *of, n_blocks, 0)[5] == pytest.approx(8.192 * part)
    monkeypatch.undo()
    of = "weight_grad", 128, as_dtype("float32"), "high"  # which are taken as several of 64
    assert 0 < costs.microseconds("k2_unfolded/k6_hopper", *of, 1000, 128, 128, 1, 0) < np.inf
