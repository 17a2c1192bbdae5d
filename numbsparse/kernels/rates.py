"""Numbers that Python and the GPU compute with alike."""

from math import sqrt

GAMMA, ZETA = -0.1, 1.1  # a hard-concrete gate is (ZETA - GAMMA) sigmoid(x) + GAMMA, cut to 0 and 1


def adam_rates(lr: float, beta1: float, beta2: float, step: float) -> tuple[float, float]:
    """(rate, root_scale): a step is rate * m / (root_scale * sqrt(v) + eps). In float64.

    rate = lr / (1 - beta1^step), root_scale = 1 / sqrt(1 - beta2^step): what moments that began as
    zeros lack after so many steps. Kingma and Ba, "Adam", 2015, section 3.
    """
    return lr / (1 - beta1**step), 1 / sqrt(1 - beta2**step)
