"""Dynamic loss scaling without the host: one thread judges the gradients and moves the scale.

A step's numbers (see `kernels.optimizer`) are then worked out on the GPU too, because how many
steps were taken is known there alone.
"""

from __future__ import annotations

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.optimizer import INFINITY
from numbsparse.kernels.rates import adam_rates
from numbsparse.kernels.views import span

_adam_rates = cuda.jit(device=True)(adam_rates)


def judge(norm, state, verdict, interval, least, most):
    """verdict = (1 / scale, whether the norm is finite), then the scale for the next step.

    state = (scale, good steps since it last changed). The scale is halved, not below `least`, where
    the norm is not finite; after `interval` good steps it is doubled, not above `most`. Of an
    interval of 0 it stays.
    """
    launch(judge_kernel, 1, 1, span(norm), state, verdict, interval, least, most)


def sgd_numbers(settings, verdict, skipped, numbers):
    """numbers = (lr, momentum, weight_decay, *verdict), from settings of the first three."""
    launch(sgd_numbers_kernel, 1, 1, settings, verdict, skipped, numbers)


def adam_numbers(settings, verdict, skipped, numbers):
    """What `ops.adam_numbers` says, and the verdict, for a step that follows skipped ones.

    settings = (lr, beta1, beta2, eps, weight_decay, decoupled, step), step counting skipped ones.
    """
    launch(adam_numbers_kernel, 1, 1, settings, verdict, skipped, numbers)


@cuda.jit
def judge_kernel(norm, state, verdict, interval, least, most):
    scale = state[0]
    good = norm[0] < INFINITY  # and no NaN
    verdict[0] = float32(1) / scale
    verdict[1] = float32(1) if good else float32(0)
    if interval == 0:
        return
    if not good:
        state[0] = max(scale / float32(2), least)
        state[1] = 0
    elif state[1] + 1 < interval:
        state[1] += float32(1)
    else:
        state[0] = min(scale * float32(2), most)
        state[1] = 0


@cuda.jit
def sgd_numbers_kernel(settings, verdict, skipped, numbers):
    for i in range(3):
        numbers[i] = settings[i]
    numbers[3], numbers[4] = verdict[0], verdict[1]
    if verdict[1] == 0:
        skipped[0] += 1


@cuda.jit
def adam_numbers_kernel(settings, verdict, skipped, numbers):
    if verdict[1] == 0:
        skipped[0] += 1
        numbers[10] = 0
        return
    lr, beta1, beta2, eps = settings[0], settings[1], settings[2], settings[3]
    weight_decay, decoupled = settings[4], settings[5] != 0
    rate, root_scale = _adam_rates(lr, beta1, beta2, int(settings[6]) - skipped[0])
    numbers[0], numbers[1], numbers[2], numbers[3] = beta1, 1 - beta1, beta2, 1 - beta2
    numbers[4], numbers[5], numbers[6] = rate, root_scale, eps
    numbers[7] = 1 - lr * weight_decay if decoupled else 1.0
    numbers[8] = 0.0 if decoupled else weight_decay
    numbers[9], numbers[10] = verdict[0], verdict[1]
