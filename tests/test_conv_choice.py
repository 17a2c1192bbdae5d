"""Which rung of the convolutions `auto` takes, and what each refuses."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from itertools import product as every

import numpy as np
import pytest
from conv_helpers import ConvCase, ConvProblem, needs_cuda, why_not

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import times
from numbsparse.kernels.conv import PRODUCTS, costs, ranked, rung, window
from numbsparse.ops import conv_window


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


# As an H200 timed them: block size, dtype, batch, side, features, taps, density, stride.
BEST = [
    ("forward", 64, "float16", 1, 8, (512, 512), 3, 0.1, 1, "k2_unfolded"),
    ("forward", 8, "float16", 64, 8, (512, 512), 3, 0.1, 1, "k6_strips"),
    ("input_grad", 64, "float16", 256, 8, (512, 512), 3, 0.1, 1, "k4_wgmma"),
    ("weight_grad", 8, "float16", 64, 8, (512, 512), 3, 0.1, 1, "k6_strips"),
    ("weight_grad", 32, "float16", 1, 8, (512, 512), 3, 0.1, 1, "k2_unfolded"),
    ("input_grad", 16, "float16", 32, 16, (64, 512), 3, 0.041, 2, "k4_wgmma"),
    ("input_grad", 8, "float16", 16, 56, (256, 512), 5, 0.131, 2, "k6_strips"),
    ("input_grad", 32, "float16", 64, 28, (256, 512), 3, 0.089, 2, "k4_wgmma"),
    ("input_grad", 32, "float16", 32, 32, (256, 64), 3, 0.123, 2, "k4_wgmma"),
    *((of, 8, "float32", 16, 28, (256, 256), 3, 0.1, 1, "k6_strips") for of in PRODUCTS),
    *((of, 8, "float32", 1, 9, (736, 224), 3, 0.042, 1, "k2_unfolded") for of in PRODUCTS),
]
ON_A_CARD = """
import json, sys
import numpy as np
from numbsparse.device import stand_in
stand_in.install()
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.conv import RUNGS, chosen
from numbsparse.ops import conv_window
names, found = [name for name, place in RUNGS.items() if place == "cuda"], []
for product, size, *call, _ in json.loads(sys.argv[1]):
    dtype, batch, side, features, taps, density, stride = call
    n_blocks = int(density * taps**2 * np.prod(features) / size**2)
    precision = "high" if dtype == "float32" else "highest"
    case = product, size, as_dtype(dtype), "cuda", batch, precision
    window = conv_window((side, side), taps, stride, taps // 2, 1)
    found.append(chosen(names, n_blocks, *case, window, *features).__name__.split(".")[-1])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def chosen_on_a_card(compilers):
    """What is chosen of BEST where rungs are asked for the plans of a card."""
    ended = subprocess.run(
        [sys.executable, "-c", ON_A_CARD, json.dumps(BEST)],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "0"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("number", range(len(BEST)))
def test_the_best_rung_is_chosen(number, chosen_on_a_card):
    assert chosen_on_a_card[number] == BEST[number][-1]


WINDOW = conv_window((16, 16), 3, 1, 1, 1)
SIZES = 4, WINDOW, 64, 128, 60  # batch, features, blocks


def counted(name, product="forward", size=16, dtype="float16", sizes=SIZES):
    return np.array(costs.counts(name, product, size, as_dtype(dtype), "highest", *sizes), float)


@needs_cuda
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "name",
    ["k3_tensor_core", "k4_wgmma", "k6_strips", *(f"k2_unfolded/{by}" for by in costs.MULTIPLIERS)],
)
def test_a_time_is_a_sum_of_what_counts(monkeypatch, name, product):
    size = 32 if name.endswith("hopper") else 16
    found = counted(name, product, size)
    assert found[0] == 1
    assert (found >= 0).all()
    assert np.isfinite(found).all()
    case = costs.case_of(name, product, size, "float16", "highest")
    factors = np.arange(1.0, found.size + 1)
    monkeypatch.setattr(costs, "measured", lambda: {case: factors.tolist()})
    how = product, size, as_dtype("bfloat16"), "highest"
    assert costs.microseconds(name, *how, *SIZES) == pytest.approx(found @ factors)
    assert costs.microseconds("k1_naive", *how, *SIZES) == np.inf  # not measured: taken last
    many = counted(name, product, size, sizes=(64, *SIZES[1:]))
    assert (many >= found).sum() > found.size / 2
    assert many.sum() > found.sum()


@needs_cuda
def test_what_is_unfolded_is_a_product_of_the_ladder():
    """Of the features that a block multiplies; in parts that stay in the cache; and is written,
    unless each output sees the pixel where it is."""
    by, of = "k8_small_batch", ("forward", as_dtype("float16"), "highest")
    read = 9 * 64 * (1 - np.exp(-60 / 36))
    product = times.in_random("forward", 16, of[1], 1024, read, 128, 60)
    found = counted(f"k2_unfolded/{by}")
    written = 2 * 1024 * read / 1e6
    np.testing.assert_allclose(found, [1, times.of_rungs(*of, product)[by], 1, written, 0, 0])
    many = counted(f"k2_unfolded/{by}", sizes=(1024, *SIZES[1:]))
    part = (1 << 25) // int(2 * read * 64) * 64
    rows = [*[part] * (1024 * 256 // part), 1024 * 256 % part]
    each = (times.in_random("forward", 16, of[1], n, read, 128, 60) for n in rows)
    assert many[1] == pytest.approx(sum(times.of_rungs(*of, n)[by] for n in each))
    alone = conv_window((16, 16), 1, 2, 0, 1)  # of whose input-gradient squares are copied
    found = counted(f"k2_unfolded/{by}", "input_grad", sizes=(4, alone, 64, 128, 60))
    copied = 2 * (4 * 256 * 64 + 4 * 64 * 64) / 1e6
    np.testing.assert_allclose(found[2:], [0, 0, 1, copied])
    assert counted(f"k2_unfolded/{by}", "weight_grad", sizes=(4, alone, 64, 128, 60))[3] > 0


@needs_cuda
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_ladder_is_asked_once(product):
    """Who multiplies what is unfolded, and how long that takes, follow from the same times."""
    before = costs.of_rungs.cache_info().misses
    window = conv_window((11, 13), 3, 1, 1, 1)  # which no other test asks about
    how = product, 16, as_dtype("float16"), "cuda", 3, "highest", window, 112, 144
    assert len(ranked(("k2_unfolded", "k3_tensor_core", "k6_strips"), 17, *how)) == 3
    assert costs.of_rungs.cache_info().misses == before + 1


def test_tiles_of_even_shapes_divide_images():
    """So 25 x 25 pixels are five times 5 x 25, and not two tiles across; and are never more."""
    for side, batch, dilation, most in ((25, 17, 1, 256), (18, 9, 1, 256), (8, 13, 2, 256)):
        of = conv_window((side, side), 3, 1, dilation, dilation).seeing("forward")
        rows = 128
        (powers, _), (even, chunks) = (
            window.cut(of, batch, rows, 9, most, shapes)
            for shapes in (window.any_shapes, window.even_shapes)
        )
        assert np.prod(even.tiles) <= np.prod(powers.tiles)
        assert even.images * np.prod(even.tile) <= rows
        assert even.images * np.prod(even.box) <= most
        assert sorted(tap for chunk in chunks for tap in chunk.taps) == list(range(9))
    of = conv_window((25, 25), 3, 1, 1, 1).seeing("forward")
    assert window.cut(of, 17, 128, 9, 256, window.even_shapes)[0].tile == (1, 5, 25)


@needs_cuda
def test_taps_that_share_boxes_load_less(monkeypatch):
    k6 = rung("k6_strips")
    caches = k6.tile_and_boxes, k6.boxes_of_weight_grad
    for product in PRODUCTS:
        shared = counted("k6_strips", product)
        monkeypatch.setattr(k6, "WORTH", -1.0)
        [cached.cache_clear() for cached in caches]
        apart = counted("k6_strips", product)
        monkeypatch.undo()
        [cached.cache_clear() for cached in caches]
        assert shared.sum() < apart.sum()


@needs_cuda
def test_boxes_at_a_stride_are_counted_apart():
    """Every second pixel is loaded, and takes as long as all of them."""
    strided = 4, conv_window((32, 32), 3, 2, 1, 1), 64, 128, 60
    for product in ("forward", "weight_grad"):
        assert (counted("k4_wgmma", product, sizes=strided) > 0).sum() > (
            counted("k4_wgmma", product) > 0
        ).sum()


@needs_cuda
def test_larger_blocks_are_taken_as_several():
    of = "weight_grad", 128, as_dtype("float32"), "high"
    assert 0 < costs.microseconds("k2_unfolded/k6_hopper", *of, *SIZES[:4], 1) < np.inf


@needs_cuda
def test_any_convolution_has_counts():
    """Of no image, or no block; of one axis or three; whatever taps see, if anything."""
    rng = np.random.default_rng(0)
    names = ["k3_tensor_core", "k4_wgmma", "k6_strips", "k2_unfolded/k8_small_batch"]
    for _ in range(60):
        axes = int(rng.integers(1, 4))
        draw = lambda low, high, axes=axes: tuple(rng.integers(low, high, axes).tolist())  # noqa: E731
        try:
            window = conv_window(draw(1, 20), draw(1, 4), draw(1, 4), draw(0, 4), draw(1, 4))
        except ValueError:  # taps that are farther apart than the image is wide
            continue
        features = rng.integers(16, 200, 2).tolist()
        sizes = int(rng.integers(0, 5)), window, *features, int(rng.integers(0, 40))
        for name, product in every(names, PRODUCTS):
            found = counted(name, product, sizes=sizes)
            assert np.isfinite(found).all()
            assert (found >= 0).all()
