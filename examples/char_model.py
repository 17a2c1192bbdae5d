"""The language model of char_lm.py, its wiring, and the dense one with as many parameters."""

from argparse import Namespace
from typing import Any

import numpy as np

import numbsparse as ns
from numbsparse import nn, patterns

State = tuple[ns.Tensor, ns.Tensor]  # h and c, (layers, batch, hidden), or (batch, hidden)

PATTERNS = ("watts_strogatz", "barabasi_albert", "random", "dense")
LEAST_BLOCKS = {"watts_strogatz": 3, "barabasi_albert": 2}


class CharModel(nn.Module):
    """Characters to logits of the next character: embedding, a recurrent cell, linear.

    `layouts` has layouts, or None for dense: one for each layer of an "lstm", whose recurrent
    weights it is, and above the first layer those of the inputs too; one for each internal step of
    an "mlstm", and one for its gates.
    """

    def __init__(
        self,
        symbols: int,
        hidden: int,
        *,
        layouts: list[Any],
        cell: str = "lstm",
        embedding: int = 64,
        block_size: int = 32,
        dtype: str = "float32",
        precision: str = "highest",
        seed: int = 0,
    ):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.hidden_size = hidden
        self.embedding = nn.Embedding(symbols, embedding, dtype=dtype, seed=rng)
        how: Any = {"block_size": block_size, "dtype": dtype, "precision": precision, "seed": rng}
        self.cell: Any
        if cell == "lstm":
            self.cell = nn.LSTM(embedding, hidden, len(layouts), layout=layouts, **how)
        else:
            how_many: Any = {"internal_steps": len(layouts) - 1, "layout": layouts}
            self.cell = nn.MultiplicativeLSTM(embedding, hidden, **how_many, **how)
        self.output = nn.Linear(hidden, symbols, **how)

    def forward(self, codes: Any, state: State) -> tuple[ns.Tensor, State]:
        """codes (time, batch) -> logits (time, batch, symbols), state."""
        hidden, state = self.read(codes, state)
        return self.output(hidden), state

    def read(self, codes: Any, state: State) -> tuple[ns.Tensor, State]:
        """codes (time, batch) -> the last layer's outputs (time, batch, hidden), state."""
        return self.cell(self.embedding(codes), state)

    def zero_state(self, batch: int) -> State:
        return self.cell.zero_state(batch)


def sparse_model(symbols: int, options: Namespace) -> tuple[CharModel, list[np.ndarray]]:
    """The small-world model that the options describe, and its patterns."""
    wiring = [make_pattern(options, options.seed + i) for i in range(n_layouts(options))]
    return build(symbols, options.hidden, wiring, options), wiring


def dense_twin(model: CharModel, symbols: int, options: Namespace) -> CharModel:
    """The dense model with as many parameters, its hidden size in whole blocks.

    The number of parameters is a quadratic in the hidden size, found from three small models.
    """
    widths = options.block_size * np.arange(1, 4)
    counts = [dense_model(symbols, int(h), options).n_parameters() for h in widths]
    a, b, c = np.polyfit(widths, counts, 2)
    hidden = (-b + np.sqrt(b * b + 4 * a * (model.n_parameters() - c))) / (2 * a)
    blocks = max(round(hidden / options.block_size), 1)
    return dense_model(symbols, blocks * options.block_size, options)


def dense_model(symbols: int, hidden: int, options: Namespace) -> CharModel:
    return build(symbols, hidden, [None] * n_layouts(options), options)


def n_layouts(options: Namespace) -> int:
    """How many layouts a model has; ValueError where the cell has no layers."""
    if options.cell == "lstm":
        return options.layers
    if options.layers > 1:
        raise ValueError(f"--layers takes 1 with --cell mlstm, got {options.layers}")
    return options.internal_steps + 1


def build(symbols: int, hidden: int, layouts: list[Any], options: Namespace) -> CharModel:
    return CharModel(
        symbols,
        hidden,
        layouts=layouts,
        cell=options.cell,
        embedding=options.embedding,
        block_size=options.block_size,
        dtype=options.dtype,
        precision=options.precision,
        seed=options.seed,
    )


def make_pattern(options: Namespace, seed: int) -> np.ndarray:
    """The recurrent weight's kept blocks, (n, n), of about the density that was asked for."""
    n = -(-options.hidden // options.block_size)
    least = LEAST_BLOCKS.get(options.pattern, 1)
    if n < least:
        raise ValueError(
            f"--pattern {options.pattern} takes at least {least} blocks of hidden units, got "
            f"{options.hidden} units in blocks of {options.block_size}"
        )
    if options.pattern == "dense":
        return patterns.dense(n, n)
    if options.pattern == "random":
        return patterns.random(n, n, options.density, seed=seed)
    if options.pattern == "barabasi_albert":  # about 2 * m * n of the n * n blocks
        m = min(max(round(options.density * n / 2), 1), n - 1)
        return patterns.barabasi_albert(n, m, seed=seed)
    m = min(max(round((options.density * n - 1) / 2), 1), (n - 1) // 2)  # n * (2 * m + 1) blocks
    return patterns.watts_strogatz(n, m, 0.2, seed=seed)
