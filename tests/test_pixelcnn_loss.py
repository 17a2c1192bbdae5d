"""The discretised mixture of logistics: a probability, its gradient, and pixels drawn from it."""

import numpy as np
import pytest
from examples_helpers import imported

import numbsparse as ns


@pytest.fixture
def loss(monkeypatch):
    return imported(monkeypatch, "pixel_loss")


def probability(loss, outputs, pixels, levels=256):
    targets = ns.Tensor(loss.targets_of(pixels, levels).astype(float))
    return np.exp(loss.log_probability(ns.Tensor(outputs), targets, levels).numpy())


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def directly(outputs, pixels):
    """The formula word for word, a difference of two sigmoids, for one pixel."""
    logits, r, g, b, *rest = outputs.reshape(10, -1)
    red, green, _ = values = pixels / 127.5 - 1
    g_by_r, b_by_r, b_by_g = np.tanh(rest[3:])
    means = r, g + g_by_r * red, b + b_by_r * red + b_by_g * green
    total = np.exp(logits) / np.exp(logits).sum()
    for value, level, mean, log_scale in zip(values, pixels, means, rest[:3], strict=True):
        upper, lower = ((value + h - mean) / np.exp(log_scale) for h in (1 / 255, -1 / 255))
        total = total * (
            (1 if level == 255 else sigmoid(upper)) - (0 if level == 0 else sigmoid(lower))
        )
    return total.sum()


def test_probability_is_the_formula(loss, rng):
    outputs = rng.standard_normal((40, 30))
    pixels = rng.choice([0, 1, 60, 128, 254, 255], (40, 3)).astype(np.uint8)
    expected = [directly(o, p.astype(float)) for o, p in zip(outputs, pixels, strict=True)]
    np.testing.assert_allclose(probability(loss, outputs, pixels), expected, rtol=1e-6)


def test_all_pixels_of_few_levels_sum_to_one(loss, rng):
    pixels = np.stack(np.meshgrid(*[np.arange(6)] * 3), axis=-1).reshape(-1, 3).astype(np.uint8)
    for scale in (0.1, 1, 3):
        outputs = np.repeat(rng.standard_normal((1, 40)) * scale, len(pixels), axis=0)
        assert probability(loss, outputs, pixels, 6).sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("log_scale", [-9.0, -5.0, 0.0, 4.0])
def test_256_levels_of_a_mixture_sum_to_one(loss, rng, log_scale):
    """Of blue: red and green, of scales so wide that their chance is known, have one level each."""
    mixtures, levels = 4, np.arange(256, dtype=np.uint8)
    rows = rng.standard_normal((10, mixtures))
    rows[4:6], rows[6] = 60, log_scale + 0.1 * rng.standard_normal(mixtures)
    pixels = np.stack([np.zeros_like(levels), np.full_like(levels, 255), levels], axis=1)
    p = probability(loss, np.repeat(rows.reshape(1, -1), 256, axis=0), pixels)
    assert p.sum() == pytest.approx(0.5 * 0.5, abs=1e-6)
    assert (p >= 0).all()


def test_far_off_values_keep_their_digits(loss):
    rows = np.zeros((1, 10))
    rows[0, 1:4], rows[0, 4:7] = [30, -30, 30], -7.0  # e^7 scales to a level, thousands away
    targets = ns.Tensor(loss.targets_of(np.uint8([[0, 128, 255]])))
    log_p = loss.log_probability(ns.Tensor(rows.astype(np.float32)), targets).numpy()
    half, scale = 1 / 255, np.exp(-7)
    expected = -(31 - half) / scale - (30 + targets.data[0, 0, 1] - half) / scale
    np.testing.assert_allclose(log_p, [expected], rtol=1e-5)


def test_loss_gradient(loss, rng):
    pixels = np.uint8([[0, 128, 255], [255, 0, 3], [7, 200, 0], [90, 91, 92]])
    targets = ns.Tensor(loss.targets_of(pixels).astype(float))
    ns.testing.check_grads(
        lambda outputs: loss.log_probability(outputs, targets), rng.standard_normal((4, 30))
    )


def test_drawn_pixels_have_their_chances(loss, rng):
    rows = np.zeros((10, 2))
    rows[0], rows[1], rows[4] = [0.0, 1.0], [-0.9, 0.5], [-3.0, -2.0]
    n = 40000
    drawn = loss.draw_pixels(np.repeat(rows.reshape(1, -1), n, axis=0), rng)[:, 0]
    edges = (np.arange(255) + 0.5) / 127.5 - 1
    weights = np.exp(rows[0]) / np.exp(rows[0]).sum()
    below = (weights[:, None] * sigmoid((edges - rows[1][:, None]) / np.exp(rows[4][:, None]))).sum(
        0
    )
    found = np.searchsorted(np.sort(drawn), np.arange(255), side="right") / n
    assert abs(found - below).max() < 1.95 / np.sqrt(n)  # Kolmogorov and Smirnov, 0.1 %


def test_drawn_colours_depend_on_those_before(loss, rng):
    rows = np.zeros(10)
    rows[1:4], rows[4:7], rows[7:] = [0.6, 0.2, -0.1], -20, [0.5, -1.0, 2.0]
    pixel = loss.draw_pixels(np.tile(rows, (5, 1)), rng)
    rows[4:7] = loss.LEAST_LOG_SCALE
    red, green = pixel[:, 0] / 127.5 - 1, pixel[:, 1] / 127.5 - 1
    by = np.tanh(rows[7:])
    means = [np.full(5, 0.6), 0.2 + by[0] * red, -0.1 + by[1] * red + by[2] * green]
    assert abs(pixel.T - (np.array(means) + 1) * 127.5).max() < 3  # a scale is a tenth of a level
