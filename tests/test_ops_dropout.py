"""The dropout mask."""

import numpy as np
import pytest
from ops_helpers import Home, in_all_homes

from numbsparse import ops


@in_all_homes
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 2)], ids=str)
def test_zeros_and_one_other_value(home, shape):
    home.send(0)  # skips where there is no GPU
    mask = home.fetch(ops.dropout_mask(shape, 0.25, 1, 0, home.dtype, home.place))
    assert mask.shape == shape
    kept = home.rounded(1 / 0.75)
    assert np.all((mask == 0) | (mask == kept))


@pytest.mark.parametrize("seed", [0, 3, 2**40 + 5])
@pytest.mark.parametrize("call", [0, 1, 2**33])
@pytest.mark.simulator
def test_the_gpu_gives_the_bits_of_the_cpu(seed, call):
    gpu, shape = Home("cuda", "float32"), (9, 7)
    gpu.send(0)
    there = gpu.fetch(ops.dropout_mask(shape, 0.3, seed, call, "float32", "cuda"))
    half = ops.dropout_mask(shape, 0.3, seed, call, "float16", "cuda").numpy()
    for dtype in ("float32", "float64"):
        here = ops.dropout_mask(shape, 0.3, seed, call, dtype, "cpu")
        np.testing.assert_array_equal(there, here.astype("float32"))
        np.testing.assert_array_equal(half != 0, here != 0)


def test_the_bits_stay_what_they_are():
    # A saved training relies on them.
    mask = ops.dropout_mask((24,), 0.5, 7, 3, "float32", "cpu") > 0
    assert "".join(map(str, mask.astype(int))) == "000000101110011111010100"


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.99])
def test_the_rate(rate):
    n = 100_000
    kept = np.count_nonzero(ops.dropout_mask((n,), rate, 5, 6, "float32", "cpu"))
    # Five standard deviations of a binomial count.
    assert abs(kept - n * (1 - rate)) <= 5 * np.sqrt(n * rate * (1 - rate))


def test_masks_are_unrelated():
    n = 4096
    masks = [
        ops.dropout_mask((n,), 0.5, seed, call, "float64", "cpu") - 1
        for seed, call in [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (0, 2**32)]
    ]
    correlation = np.corrcoef(masks)
    assert np.all(np.abs(correlation - np.eye(len(masks))) < 5 / np.sqrt(n))
    for shift in (1, 2, 32, 256):  # and a mask with itself a few steps on
        assert abs(np.mean(masks[0][shift:] * masks[0][:-shift])) < 5 / np.sqrt(n)


REFUSED = {
    "rate 1": ({"rate": 1.0}, ValueError, "rate takes a number from 0 to below 1"),
    "rate -1": ({"rate": -0.1}, ValueError, "rate takes a number from 0 to below 1"),
    "rate nan": ({"rate": float("nan")}, ValueError, "rate takes a number from 0 to below 1"),
    "seed": ({"seed": -1}, ValueError, "seed takes an integer"),
    "call": ({"call": 2**64}, ValueError, "call takes an integer"),
    "dtype": ({"dtype": "int32"}, TypeError, "dtype takes .* got int32"),
    "place": ({"place": "gpu"}, ValueError, "place takes"),
    "size": ({"shape": (2**20, 2**13)}, ValueError, "shape takes up to"),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(change, error, message):
    right = {"shape": (3,), "rate": 0.5, "seed": 0, "call": 0, "dtype": "float32", "place": "cpu"}
    with pytest.raises(error, match=message):
        ops.dropout_mask(**(right | change))
