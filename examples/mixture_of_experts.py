"""A mixture of experts that drops no token, as block-sparse products; its router is learned too.

    python examples/mixture_of_experts.py                       # Python's own sources, on this CPU
    python examples/mixture_of_experts.py --device cuda --experts 64 --width 1024 --hidden 1024 \\
        --context 16 --tokens 16384 --block-size 128 --steps 2000      # takes torch besides a GPU

A small network reads the last bytes of a text and predicts the next one. Its middle layer is a
number of experts, each a two-layer network, and each token goes to the one that a router chooses.
Tokens are sorted by expert, and each expert's are padded to whole blocks, not to a common length.
The hidden features are then a matrix with a block row for each block of tokens and block columns
for each expert, block-diagonal and another one at every step: `ns.Layout.on_device` makes its
layout where the router's choices are, and three block-sparse products do the rest. Beside it trains
a dense network that does as much work for a token.

After T. Gale, D. Narayanan, C. Young, M. Zaharia, "MegaBlocks: Efficient Sparse Training with
Mixture-of-Experts", 2022; the router and its balance after W. Fedus, B. Zoph, N. Shazeer, "Switch
Transformers", 2021, section 2.
"""

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from math import log
from typing import Any, NamedTuple

import numpy as np
from char_options import from_0, positive, positive_number
from char_text import Text, open_text
from progress import progress_bar
from ranks import part_of, ranks

import numbsparse as ns
from numbsparse import nn
from numbsparse.distributed import DataParallel, Group
from numbsparse.nn import functional as F

BALANCE = 0.01  # how much an uneven share of tokens costs
HELD_OUT = 8  # batches
REPEATS = 5  # of what is timed


class Routes(NamedTuple):
    """Where tokens go: to rows, those of an expert together, in whole blocks."""

    layout: ns.Layout  # of the hidden features: (row blocks, experts * block columns of each)
    token_of: Any  # (rows,) the token of each row; of those to spare any, whose results none reads
    row_of: Any  # (tokens,) the row of each token
    one_hot: Any  # (tokens, experts)


def routes(chosen: Any, experts: int, columns: int, block: int, xp: Any) -> Routes:
    """From the expert of each token, (tokens,), an array of xp: numpy, or torch on a GPU.

    All shapes are known beforehand, so nothing waits for the GPU: there may be `tokens // block +
    experts` blocks of rows, and those behind the last token have no blocks of features.
    """

    def numbers(n: int) -> Any:
        return xp.arange(n) if xp is np else xp.arange(n, device=chosen.device)

    tokens, row_blocks = len(chosen), len(chosen) // block + experts
    one_hot = chosen[:, None] == numbers(experts)
    counts = one_hot.sum(0)
    blocks = (counts + block - 1) // block
    ends, order = xp.cumsum(blocks, 0), xp.argsort(chosen, stable=True)
    # A token's row: where its expert's blocks begin, and how many tokens of it came before.
    first = (ends - blocks) * block - (xp.cumsum(counts, 0) - counts)
    row_of, token_of = numbers(tokens), numbers(row_blocks * block) % tokens
    row_of[order] = first[chosen[order]] + numbers(tokens)
    token_of[row_of] = numbers(tokens)

    expert = xp.searchsorted(ends, numbers(row_blocks), side="right")[:, None]
    places = xp.where(expert < experts, expert * columns + numbers(columns), -1)
    rows = numbers(row_blocks)[:, None] + 0 * places
    layout = ns.Layout.on_device(rows, places, (row_blocks, experts * columns))
    one_hot = one_hot.astype(np.float32) if xp is np else one_hot.float()
    return Routes(layout, token_of, row_of, one_hot)


class MixtureOfExperts(nn.Module):
    """x (tokens, width) -> (y, balance): y = p relu(x @ w1) @ w2 of the expert of largest p."""

    def __init__(self, width: int, hidden: int, experts: int, block: int, seed: Any = None):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.experts, self.block, self.columns = experts, block, hidden // block
        self.router = nn.Linear(width, experts, bias=False, block_size=4, seed=rng)
        self.w1 = nn.Parameter(_drawn(rng, width, (width, experts * hidden)))
        self.w2 = nn.Parameter(_drawn(rng, hidden, (experts * hidden, width)))
        self.routes: Any = None  # those of the last call

    def forward(self, x: ns.Tensor) -> tuple[ns.Tensor, ns.Tensor]:
        p = F.softmax(self.router(x))
        numbers, xp = _borrowed(p.data)
        chosen = xp.argmax(numbers, 1)
        found = routes(chosen, self.experts, self.columns, self.block, xp)
        to = self.routes = Routes(found.layout, *map(_lent, found[1:]))
        rows = F.embedding(x, to.token_of)
        hidden = F.relu(ns.sddmm(rows, self.w1, to.layout, block_size=self.block))
        y = F.embedding(ns.matmul(hidden, self.w2), to.row_of)
        shares = F.mean(ns.Tensor(to.one_hot), 0)
        balance = F.multiply(F.sum(F.multiply(F.mean(p, 0), shares)), float(self.experts))
        return F.multiply(y, F.sum(F.multiply(p, to.one_hot), 1, True)), balance


def one_by_one(x: Any, dy: Any, p: Any, w1: Any, w2: Any, chosen: Any) -> list[np.ndarray]:
    """[y, dx, dp, dw1, dw2] of a loop over experts, in NumPy: what the products must give.

    p (tokens, experts) are their probabilities; those of experts that were not chosen have no part
    in y.
    """
    size = w2.shape[0] // p.shape[1]
    y, dx, dp, dw1, dw2 = map(np.zeros_like, (x, x, p, w1, w2))
    for expert in range(p.shape[1]):
        own, at = np.flatnonzero(chosen == expert), slice(expert * size, (expert + 1) * size)
        hidden = np.maximum(x[own] @ w1[:, at], 0)
        out, by = hidden @ w2[at], p[own, expert, None]
        y[own], dp[own, expert] = by * out, (dy[own] * out).sum(1)
        dhidden = (by * dy[own] @ w2[at].T) * (hidden > 0)
        dw2[at], dw1[:, at] = hidden.T @ (by * dy[own]), x[own].T @ dhidden
        dx[own] = dhidden @ w1[:, at].T
    return [y, dx, dp, dw1, dw2]


class Dense(nn.Module):
    """What one expert does, for every token."""

    def __init__(self, width: int, hidden: int, seed: Any = None):
        super().__init__()
        rng = np.random.default_rng(seed)
        layers = nn.Linear(width, hidden, seed=rng), nn.ReLU(), nn.Linear(hidden, width, seed=rng)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: ns.Tensor) -> tuple[ns.Tensor, None]:
        return self.layers(x), None


class Model(nn.Module):
    """Codes of the last bytes (tokens, context) -> logits of the next, and the middle's balance."""

    def __init__(self, symbols: int, width: int, context: int, middle: Any, seed: Any = None):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.embedding = nn.Embedding(symbols, width // context, seed=rng)
        self.middle, self.output = middle, nn.Linear(width, symbols, seed=rng)

    def forward(self, codes: Any) -> tuple[ns.Tensor, ns.Tensor | None]:
        x = F.reshape(self.embedding(codes), (codes.shape[0], -1))
        y, balance = self.middle(x)
        return self.output(F.add(x, y)), balance


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train both; gives the bits per byte that each needs on text that it has not seen."""
    options = parse(arguments)
    try:
        with ranks() as group:
            return train_both(options, group)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"mixture_of_experts: {error}")


def train_both(options: Namespace, group: Group) -> dict[str, float]:
    text = open_text(options.text)
    if (shortest := min(text.train.size, text.held_out.size)) <= options.context:
        takes = f"one of which {options.context + 1} bytes are held out, as --context asks"
        raise ValueError(f"--text takes {takes}, got {shortest}")
    print(f"{text.name}, {text.train.size:,} bytes to learn from")
    width, symbols = options.width, len(text.alphabet)
    size = options.hidden, options.experts, options.block_size
    experts = MixtureOfExperts(width, *size, options.seed)
    middles = {"experts": experts, "dense": Dense(width, options.hidden, options.seed)}
    bits, trained = {}, {}
    for name, middle in middles.items():
        model = Model(symbols, width, options.context, middle, options.seed)
        if options.device == "cuda":
            model.to("cuda")
        began = time.perf_counter()
        trained[name] = train(name, model, text, options, group)
        took = (time.perf_counter() - began) / options.steps
        bits[name] = held_out(model, text, options)
        print(f"{name:8} {bits[name]:.3f} bits per byte held out, {model.n_parameters():,} "
              f"parameters, {1e3 * took:.1f} ms a step")  # fmt: skip
    with trained["experts"].no_sync():  # of the layer alone
        compare(experts, options)
    return bits


def train(name: str, model: Model, text: Text, options: Namespace, group: Group) -> DataParallel:
    """On each rank of its part of the tokens, over which it balances the experts."""
    rows = part_of(options.tokens, group, "--tokens")
    parallel = DataParallel(model, group)
    optimizer = nn.optim.Adam(model.parameters(), lr=options.lr)
    rng = np.random.default_rng(options.seed)
    with progress_bar(name, options.steps, unit="byte", read="bytes") as bar:
        for step in range(1, options.steps + 1):
            codes, targets = (a[rows] for a in batch(text, text.train, options, rng))
            logits, balance = model(codes)
            loss = F.cross_entropy(logits, targets)
            optimizer.zero_grad()
            (loss if balance is None else F.add(loss, F.multiply(balance, BALANCE))).backward()
            optimizer.step()
            if step % 20 == 0 or step == options.steps:
                bar.show(step, (step, loss.item() / log(2), float("nan")), options.tokens)
    return parallel


def batch(text: Text, part: np.ndarray, options: Namespace, rng: Any) -> tuple[Any, Any]:
    """Codes (tokens, context) of bytes anywhere in a part of the text, and of those that follow."""
    last = rng.integers(options.context, part.size, options.tokens)
    codes = text.code_of[part[last[:, None] + np.arange(-options.context, 1)]]
    seen, following = codes[:, :-1].copy(), codes[:, -1].copy()
    if options.device == "cpu":
        return seen, following
    return ns.to_device(seen), ns.to_device(following)


def held_out(model: Model, text: Text, options: Namespace) -> float:
    rng, losses = np.random.default_rng(1), []
    with ns.no_grad():
        for _ in range(HELD_OUT):
            codes, targets = batch(text, text.held_out, options, rng)
            losses.append(F.cross_entropy(model(codes)[0], targets).item() / log(2))
    return float(np.mean(losses))


def compare(layer: MixtureOfExperts, options: Namespace) -> None:
    """The layer's time forward and backward, beside that of the experts one by one."""
    rng, shape = np.random.default_rng(2), (options.tokens, options.width)
    x, dy = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    own = [ns.to_device(a) if options.device == "cuda" else a for a in (x, dy)]

    def block_sparse() -> None:
        y, _ = layer(ns.Tensor(own[0], requires_grad=True))
        F.sum(F.multiply(y, own[1])).backward()

    p = F.softmax(layer.router(ns.Tensor(own[0]))).numpy()
    others = x, dy, p, layer.w1.numpy(), layer.w2.numpy(), p.argmax(1)
    ours, theirs = seconds(block_sparse), seconds(lambda: one_by_one(*others))
    layout = layer.routes.layout
    print(f"the layer, forward and backward: {1e3 * ours:.1f} ms; experts one by one on the CPU "
          f"{1e3 * theirs:.1f} ms; {layout.check()} blocks of {layout.shape}")  # fmt: skip


def seconds(call: Callable[[], Any]) -> float:
    """The shortest of some calls."""
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        if ns.device.is_available():
            ns.synchronize()
        took.append(time.perf_counter() - began)
    return min(took)


def parse(arguments: list[str] | None) -> Namespace:
    described, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=described)
    add = parser.add_argument
    add("--text", help="a file or a folder (the standard library's sources)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--experts", type=positive, default=8, help="(%(default)s)")
    add("--width", type=positive, default=128, help="features of a token (%(default)s)")
    add("--hidden", type=positive, default=256, help="features of an expert (%(default)s)")
    add("--context", type=positive, default=8, help="bytes that a token sees (%(default)s)")
    add("--tokens", type=positive, default=1024, help="in a step (%(default)s)")
    add("--block-size", type=int, choices=(4, 8, 16, 32, 64, 128), default=32, help="(%(default)s)")
    add("--steps", type=positive, default=300, help="updates (%(default)s)")
    add("--lr", type=positive_number, default=3e-3, help="learning rate (%(default)s)")
    add("--seed", type=from_0, default=0, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if options.hidden % options.block_size:
        parser.error(f"--hidden takes multiples of the block size, got {options.hidden}")
    if options.width % options.context:
        parser.error(f"--width takes multiples of --context, got {options.width}")
    if options.device == "cuda":
        _require_torch()
    return options


def _drawn(rng: np.random.Generator, fan_in: int, shape: tuple[int, int]) -> np.ndarray:
    return rng.uniform(-1, 1, shape).astype(np.float32) / np.float32(fan_in**0.5)


def _borrowed(a: Any) -> tuple[Any, Any]:
    """(an array of ours as one of the library that sorts and counts there, that library)."""
    if isinstance(a, np.ndarray):
        return a, np
    import torch

    return torch.from_dlpack(a), torch


def _lent(a: Any) -> Any:
    """And back; the same memory."""
    return a if isinstance(a, np.ndarray) else ns.device.as_device_array(a)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        sys.exit("mixture_of_experts: --device cuda takes torch, which sorts tokens on the GPU")


if __name__ == "__main__":
    main()
