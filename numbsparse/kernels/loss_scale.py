"""Dynamic loss scaling without the host: one thread judges the gradients and moves the scale.

A step's numbers (see `kernels.optimizer`) are then worked out on the GPU too, because how many
steps were taken is known only there.
"""

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.optimizer import INFINITY
from numbsparse.kernels.rates import adam_rates

MOST_ROWS = 32  # in a block
_adam_rates = cuda.jit(device=True)(adam_rates)


def judge(norm, state, verdict, interval, least, most):
    """verdict = (1 / scale, whether the norm is finite), then the scale for the next step.

    state = (scale, good steps since it last changed). The scale is halved, not below `least`, where
    the norm is not finite; after `interval` good steps it is doubled, not above `most`. Of an
    interval of 0 it stays.
    """
    launch(judge_kernel, 1, 1, norm.span, state, verdict, interval, least, most)


def sgd_numbers(settings, verdict, skipped, numbers):
    """Rows (lr, momentum, weight_decay, *verdict), from rows of the first three and a `member`.

    Where the verdict is to skip, skipped[0] counts it, and skipped[member] of each row.
    """
    rows = settings.size // 4
    launch(sgd_numbers_kernel, *_grid(rows), settings, verdict, skipped, numbers, rows)


def adam_numbers(settings, verdict, skipped, numbers):
    """Rows of what `ops.adam_numbers` says, and the verdict, of steps that follow skipped ones.

    Rows of settings: lr, beta1, beta2, eps, weight_decay, decoupled, step, member, where step
    counts the skipped[member] that were skipped.
    """
    rows = settings.size // 8
    launch(adam_numbers_kernel, *_grid(rows), settings, verdict, skipped, numbers, rows)


def _grid(rows):
    """A thread for each row."""
    threads = min(rows, MOST_ROWS)
    return -(-rows // threads), threads


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
def sgd_numbers_kernel(settings, verdict, skipped, numbers, rows):
    row = cuda.grid(1)
    if row >= rows:
        return
    for i in range(3):
        numbers[5 * row + i] = settings[4 * row + i]
    numbers[5 * row + 3], numbers[5 * row + 4] = verdict[0], verdict[1]
    if verdict[1] == 0:
        count_skip(skipped, row, int(settings[4 * row + 3]))


@cuda.jit
def adam_numbers_kernel(settings, verdict, skipped, numbers, rows):
    row = cuda.grid(1)
    if row >= rows:
        return
    own, to = 8 * row, 11 * row
    member = int(settings[own + 7])
    if verdict[1] == 0:
        count_skip(skipped, row, member)
        numbers[to + 10] = 0
        return
    lr, beta1, beta2 = settings[own], settings[own + 1], settings[own + 2]
    weight_decay, decoupled = settings[own + 4], settings[own + 5] != 0
    rate, root_scale = _adam_rates(lr, beta1, beta2, int(settings[own + 6]) - skipped[member])
    numbers[to], numbers[to + 1] = beta1, 1 - beta1
    numbers[to + 2], numbers[to + 3] = beta2, 1 - beta2
    numbers[to + 4], numbers[to + 5], numbers[to + 6] = rate, root_scale, settings[own + 3]
    numbers[to + 7] = 1 - lr * weight_decay if decoupled else 1.0
    numbers[to + 8] = 0.0 if decoupled else weight_decay
    numbers[to + 9], numbers[to + 10] = verdict[0], verdict[1]


@cuda.jit(device=True)
def count_skip(skipped, row, member):
    skipped[member] += 1
    if row == 0:
        skipped[0] += 1
