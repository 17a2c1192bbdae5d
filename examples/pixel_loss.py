"""The discretised mixture of logistics of PixelCNN++: how likely a pixel is, and pixels drawn.

A colour is one of 256 levels v, laid out over -1 to 1. Its chance is what a logistic distribution
has between half a level below and half a level above, S((v + h - m) / s) - S((v - h - m) / s) with
the sigmoid S; the outermost levels take what lies beyond. A pixel's three colours come from one of
several such mixtures; the mean of green depends on red, that of blue on both.

Salimans, Karpathy, Chen and Kingma, "PixelCNN++: Improving the PixelCNN with Discretized Logistic
Mixture Likelihood and Other Modifications", 2017, sections 2.1 and 2.2.
"""

import numpy as np

import numbsparse as ns
from numbsparse.nn import functional as F

LEVELS = 256
PER_MIXTURE = 10  # a weight; 3 means; 3 logarithms of scales; green by red, blue by red, by green
LEAST_LOG_SCALE = -7.0


def scaled(images: np.ndarray, levels: int = LEVELS) -> np.ndarray:
    """Levels from 0 on as numbers from -1 to 1."""
    return (images * (2 / (levels - 1)) - 1).astype(np.float32)


def targets_of(images: np.ndarray, levels: int = LEVELS) -> np.ndarray:
    """What the loss reads of images (..., 3): (3, pixels, 3) of float32.

    The colours from -1 to 1; 0 where a colour is the lowest level, else 1; the same of the highest.
    """
    pixels = images.reshape(-1, 3)
    return np.stack([scaled(pixels, levels), pixels > 0, pixels < levels - 1]).astype(np.float32)


def log_probability(outputs: ns.Tensor, targets: ns.Tensor, levels: int = LEVELS) -> ns.Tensor:
    """The logarithm of each pixel's probability, (pixels,), in nats.

    Parameters
    ----------
    outputs : Tensor, (pixels, 10 * mixtures): what the network says of each pixel
    targets : Tensor of the same dtype, as `targets_of` makes it
    """
    logits, means, log_scales = parts(outputs, targets[0])
    total = F.log_softmax(logits)
    for colour, (mean, log_scale) in enumerate(zip(means, log_scales, strict=True)):
        column = slice(colour, colour + 1)
        value, above, below = (targets[i, :, column] for i in range(3))
        total = total + log_chance(value, above, below, mean, log_scale, levels)
    return F.logsumexp(total)


def parts(
    outputs: ns.Tensor, colours: ns.Tensor
) -> tuple[ns.Tensor, list[ns.Tensor], list[ns.Tensor]]:
    """The mixtures' logits, and the means and logarithms of scales of red, green and blue.

    Each is (pixels, mixtures). `colours` (pixels, 3) are those that the means depend on.
    """
    rows = outputs.reshape(outputs.shape[0], PER_MIXTURE, -1)
    logits, r, g, b, *others = F.unbind(rows, axis=1)
    g_by_r, b_by_r, b_by_g = (F.tanh(row) for row in others[3:])
    red, green = colours[:, 0:1], colours[:, 1:2]
    means = [r, g + g_by_r * red, b + b_by_r * red + b_by_g * green]
    return logits, means, [F.relu(s - LEAST_LOG_SCALE) + LEAST_LOG_SCALE for s in others[:3]]


def log_chance(
    value: ns.Tensor,
    above: ns.Tensor,
    below: ns.Tensor,
    mean: ns.Tensor,
    log_scale: ns.Tensor,
    levels: int,
) -> ns.Tensor:
    """log(S(upper) - S(lower)), where `above` the lowest level and `below` the highest.

    It is log S(upper) + log S(-lower) + log(1 - e^(lower - upper)), which keeps its digits however
    far off the value is. Of it the lowest level has the first term alone, the highest the second.
    """
    half = 1 / (levels - 1)
    inverse, away = F.exp(-log_scale), value - mean
    upper, lower = (away + half) * inverse, (away - half) * inverse
    between = F.log(-F.expm1(inverse * (-2 * half)))
    return below * F.log_sigmoid(upper) + above * F.log_sigmoid(-lower) + (above * below) * between


def draw_pixels(outputs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Pixels (n, 3) of bytes, drawn from what the network says of them, (n, 10 * mixtures)."""
    of_all = outputs.reshape(len(outputs), PER_MIXTURE, -1).astype(np.float64)
    chosen = np.argmax(of_all[:, 0] + rng.gumbel(size=of_all[:, 0].shape), axis=1)
    rows = of_all[np.arange(len(of_all)), :, chosen]
    means, log_scales = rows[:, 1:4], np.maximum(rows[:, 4:7], LEAST_LOG_SCALE)
    by = np.tanh(rows[:, 7:])
    noise = np.exp(log_scales) * rng.logistic(size=means.shape)
    drawn = np.zeros((len(rows), 3), np.uint8)
    for colour in range(3):
        red, green = scaled(drawn[:, 0]), scaled(drawn[:, 1])
        mean = means[:, colour] + (0, by[:, 0] * red, by[:, 1] * red + by[:, 2] * green)[colour]
        level = np.rint((mean + noise[:, colour] + 1) * (LEVELS - 1) / 2)
        drawn[:, colour] = np.clip(level, 0, LEVELS - 1)
    return drawn
