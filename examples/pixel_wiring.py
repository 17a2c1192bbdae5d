"""Which blocks of features the convolutions of a PixelCNN join."""

from typing import Any

import numpy as np

from numbsparse import patterns


class Wiring:
    """The patterns of a network's convolutions: each output block sees equally many inputs.

    A pattern can only have a density of so many blocks of all; what one has too many or too few,
    the next ones make up for. Without a density the patterns are dense.
    """

    def __init__(self, density: float | None, block_size: int, seed: int):
        self.density, self.block_size = density, block_size
        self.rng = np.random.default_rng(seed)
        self.weights, self.kept, self.owed = 0, 0, 0.0  # numbers; numbers; blocks

    def pattern(self, in_features: int, out_features: int, taps: np.ndarray) -> Any:
        rows, columns = (-(-n // self.block_size) for n in (in_features, out_features))
        column = int(taps.sum()) * columns  # blocks that one more input for each output costs
        fan_in = rows
        if self.density is not None:
            wanted = self.density * rows + self.owed / column
            fan_in = int(np.clip(round(wanted), 1, rows))
            self.owed = (wanted - fan_in) * column
        self.weights += rows * column * self.block_size**2
        self.kept += fan_in * column * self.block_size**2
        if self.density is None:
            return None
        return patterns.balanced_random(rows, columns, fan_in, seed=self.rng)
