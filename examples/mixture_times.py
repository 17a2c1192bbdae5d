"""How long a mixture of experts takes in torch: block-sparse products, grouped ones, and a loop.

    python examples/mixture_times.py --json times.json        # takes a GPU and torch

Two products with a relu between, forward and backward, of tokens that are sorted by expert: by
numbsparse.torch in a layout that each step makes on the GPU, by `torch._grouped_mm`, and by torch's
products expert by expert. First all must agree. Times are medians, captured in a CUDA graph (what
the GPU takes) and called (what the host adds).
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import numbsparse as ns
import numbsparse.torch as nst
from numbsparse.bench.timing import graph_of, record_torch, seconds_of
from numbsparse.files import check_writable, write_json
from numbsparse.machine import describe

SIZES = ((8192, 8, 1024, 4096), (16384, 64, 1024, 1024), (16384, 64, 2048, 1408))
BLOCK = 128
NAMES = "numbsparse", "torch._grouped_mm", "loop"
REPEATS = 10  # of calls
Call = Callable[[], tuple[torch.Tensor, ...]]


class Tokens(NamedTuple):
    """Which expert has which tokens, in their order; and in rows of whole blocks."""

    counts: list[int]
    offsets: torch.Tensor  # where the tokens of each expert end
    row_of: torch.Tensor  # of each token
    rows: torch.Tensor  # the block rows and block columns of hidden features, -1 for none
    columns: torch.Tensor
    grid: tuple[int, int]


def tokens_of(tokens: int, experts: int, hidden: int, block: int, device: str) -> Tokens:
    chosen = torch.randint(0, experts, (tokens,), generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(chosen, minlength=experts).to(device)
    blocks, wide = (counts + block - 1) // block, hidden // block
    ends, last = counts.cumsum(0), blocks.cumsum(0)
    shift = (last - blocks) * block - (ends - counts)
    row_of = torch.arange(tokens, device=device) + shift.repeat_interleave(counts)
    grid = tokens // block + experts, experts * wide
    rows = torch.arange(grid[0], device=device)[:, None]
    expert = torch.searchsorted(last, rows, right=True)
    columns = torch.arange(wide, device=device) + expert * wide
    columns = torch.where(expert < experts, columns, -1)
    rows = rows.expand_as(columns).contiguous()
    return Tokens(counts.tolist(), ends.int(), row_of, rows, columns, grid)


def layers(
    size: tuple[int, int, int, int], block: int, device: str, dtype: torch.dtype
) -> dict[str, Call]:
    """By name what gives (y, dx, dw1, dw2), of the same numbers."""
    tokens, experts, width, hidden = size
    of = tokens_of(tokens, experts, hidden, block, device)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, over: float = 1) -> torch.Tensor:
        numbers = torch.randn(shape, device=device, generator=generator) / over**0.5
        return numbers.to(dtype)

    x, dy = drawn(tokens, width), drawn(tokens, width)
    w1, w2 = drawn(experts, width, hidden, over=width), drawn(experts, hidden, width, over=hidden)
    x_rows, dy_rows = (x.new_zeros(of.grid[0] * block, width) for _ in range(2))
    x_rows[of.row_of], dy_rows[of.row_of] = x, dy
    flat = w1.transpose(0, 1).reshape(width, -1), w2.reshape(-1, width)
    inputs = [a.requires_grad_() for a in (x_rows, *(a.clone() for a in flat), x, w1, w2)]
    x_rows, flat1, flat2, x, w1, w2 = inputs

    def block_sparse() -> tuple[torch.Tensor, ...]:
        layout = ns.Layout.on_device(of.rows, of.columns, of.grid)
        hidden = nst.sddmm(x_rows, flat1, layout, block_size=block)
        y = nst.matmul(nst.BlockSparse(torch.relu(hidden.values), layout), flat2)
        return y, *torch.autograd.grad(y, (x_rows, flat1, flat2), dy_rows)

    def grouped() -> tuple[torch.Tensor, ...]:
        product: Any = torch._grouped_mm
        y = product(torch.relu(product(x, w1, offs=of.offsets)), w2, offs=of.offsets)
        return y, *torch.autograd.grad(y, (x, w1, w2), dy)

    def loop() -> tuple[torch.Tensor, ...]:
        parts = zip(x.split(of.counts), w1, w2, strict=True)
        y = torch.cat([torch.relu(own @ one) @ two for own, one, two in parts])
        return y, *torch.autograd.grad(y, (x, w1, w2), dy)

    def as_tokens() -> tuple[torch.Tensor, ...]:
        y, dx, dw1, dw2 = block_sparse()
        dw1 = dw1.reshape(width, experts, hidden).transpose(0, 1)
        return y[of.row_of], dx[of.row_of], dw1, dw2.reshape(w2.shape)

    check("numbsparse", as_tokens(), loop())
    return dict(zip(NAMES, (block_sparse, grouped, loop), strict=True))


def check(name: str, got: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> None:
    """Each within 2 % of the largest: what bfloat16 rounds, in sums of sums."""
    for what, one, other in zip(("y", "dx", "dw1", "dw2"), got, right, strict=True):
        error = ((one - other).abs().max() / other.abs().max()).item()
        if not error < 0.02:
            raise ArithmeticError(f"{name}: {what} is off by {error:.3g} of the largest value")


def times(calls: dict[str, Call]) -> dict[str, dict[str, float]]:
    """Seconds of each, captured and called. A loop of many launches is called alone."""
    for call in calls.values():
        for _ in range(3):
            call()
    graphs = {name: graph_of(record_torch, calls[name]) for name in NAMES[:2]}
    return {"captured": seconds_of(graphs, 0.1), "called": {n: called(c) for n, c in calls.items()}}


def called(call: Call) -> float:
    took = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return median(took)


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where the times go")
    options = parser.parse_args(given)
    if options.json:
        check_writable(options.json)  # before the measuring
    if not torch.cuda.is_available():
        sys.exit("mixture_times: takes a GPU that torch sees")
    rows = []
    for size in SIZES:
        found = times(layers(size, BLOCK, "cuda", torch.bfloat16))
        row = dict(zip(("tokens", "experts", "width", "hidden"), size, strict=True))
        rows.append(row | {"seconds": found})
        said = ", ".join(
            f"{how} {name} {1e3 * s:.3g}" for how, of in found.items() for name, s in of.items()
        )
        print(*row.values(), "milliseconds:", said, flush=True)
    if options.json:
        command = shlex.join(["python", "examples/mixture_times.py", *given])
        what = {"machine": describe("cuda"), "command": command, "rows": rows}
        write_json(options.json, what, 2)


if __name__ == "__main__":
    main()
