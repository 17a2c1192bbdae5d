"""The network of prune.py and grow.py: it guesses the next letter of a text from those before."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from char_text import Text

import numbsparse as ns
from numbsparse import nn

F = nn.functional
N_HELD_OUT = 4096  # windows


@dataclass
class Windows:
    """Stretches of `width` letters of a text, and the letter after each."""

    text: Text
    width: int

    def drawn(self, n: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """n of them to train on, (n, width) and (n,) int32: the same for a seed and a step."""
        last = self.text.train.size - self.width
        starts = np.random.default_rng([seed, step]).integers(last, size=n)
        return self._at(self.text.train, starts)

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Some at equal distances, of text that is not trained on."""
        last = self.text.held_out.size - self.width - 1
        starts = np.linspace(0, last, N_HELD_OUT).astype(np.int64)
        return self._at(self.text.held_out, starts)

    def _at(self, part: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = self.text.code_of[part[starts[:, None] + np.arange(self.width + 1)]]
        return codes[:, :-1], codes[:, -1]


class LetterModel(nn.Module):
    """letters (n, window) to scores (n, symbols): an embedding, two wide layers, and a dense one.

    The wide layers are as wide as all features of a window together, and have the layouts.
    """

    def __init__(self, symbols: int, options: Namespace, layouts: Sequence[Any] = (None, None)):
        super().__init__()
        rng, width = np.random.default_rng(options.seed), options.window * options.features
        how: dict[str, Any] = {"block_size": options.block_size, "dtype": options.dtype}
        self.letters = nn.Embedding(symbols, options.features, dtype=options.dtype, seed=rng)
        self.first, self.second = (
            nn.Linear(width, width, layout=layout, seed=rng, **how) for layout in layouts
        )
        self.scores = nn.Linear(width, symbols, seed=rng, **how)

    @property
    def wide(self) -> list[nn.module.MatrixParameter]:
        """The weights whose layouts change."""
        return [self.first.weight, self.second.weight]

    @property
    def density(self) -> float:
        """Of both together."""
        layouts = [weight.data.layout for weight in self.wide]
        return sum(a.n_blocks for a in layouts) / sum(a.pattern.size for a in layouts)

    def forward(self, letters: Any) -> ns.Tensor:
        x = self.letters(letters)
        x = F.reshape(x, (x.shape[0], -1))
        return self.scores(F.relu(self.second(F.relu(self.first(x)))))
