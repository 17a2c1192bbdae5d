"""Train a small GPT in plain torch, dense and with block-sparse MLPs, on real text.

    python examples/torch_gpt.py                 # the standard library's sources, on this CPU
    python examples/torch_gpt.py --text enwik8 --width 768 --layers 12 --length 512 --steps 20000 \\
        --batch 32 --device cuda --amp       # or torchrun --nproc-per-node 2 in place of python

The model knows nothing of numbsparse: one call, `sparsify_`, puts block-sparse layers in the place
of its MLPs' linear ones. Three models see the same characters: the dense one; a sparse one of the
same width, which keeps a quarter of its blocks; and a sparse one whose MLPs are four times as wide,
so that it has as many parameters as the dense one. For each the program says how many there are,
how long a step takes and how many bits per character it needs on text that it has not seen.

The architecture is that of Radford et al., "Language Models are Unsupervised Multitask Learners",
2019 (GPT-2); block-sparse weights after Gray, Radford and Kingma, "GPU Kernels for Block-Sparse
Weights", 2017.
"""

import argparse
import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from char_options import from_0, positive, positive_number, share
from char_text import Text, check_length, open_text
from progress import progress_bar
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import numbsparse as ns
import numbsparse.torch as nst
from numbsparse import device
from numbsparse.bench import results
from numbsparse.machine import in_a_list, versions_of

HEAD, EVERY = 32, 10


class Block(nn.Module):
    """Attention to what came before, then an MLP, each beside a way around it."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, -1, HEAD)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """codes (batch, length) -> logits (batch, length, symbols)."""

    def __init__(self, symbols: int, width: int, layers: int, length: int, hidden: int):
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, hidden) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.symbol(codes) + self.place.weight[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def in_mlp(module: nn.Module, name: str) -> bool:
    return ".mlp." in name


def make(kind: str, symbols: int, options: Namespace) -> GPT:
    """The dense model, or one made sparse: each block of outputs has as many inputs."""
    torch.manual_seed(options.seed)
    wider = round(1 / options.density) if kind == "wide" else 1
    sizes = options.width, options.layers, options.length, 4 * options.width * wider
    model = GPT(symbols, *sizes)
    if kind != "dense":

        def pattern(rows: int, columns: int) -> Any:
            fan_in = max(round(options.density * rows), 1)
            return ns.patterns.balanced_random(rows, columns, fan_in, seed=options.seed)

        nst.sparsify_(model, in_mlp, pattern=pattern, block_size=options.block_size)
    return model.to(options.device)


@contextmanager
def all_ranks() -> Iterator[tuple[int, int]]:
    """`ranks` of those that torchrun has started; left together, so that no one waits for one."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group()
    try:
        yield ranks()
    finally:
        if under_torchrun:
            distributed.destroy_process_group()


def ranks() -> tuple[int, int]:
    """This process and how many there are."""
    there = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if there else (0, 1)


def train(kind: str, text: Text, options: Namespace) -> dict[str, Any]:
    """One model, trained; its row of the table."""
    model = make(kind, len(text.alphabet), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    rank, size = ranks()
    call = DistributedDataParallel(model, gradient_as_bucket_view=True) if size > 1 else model
    if options.compile:
        mode = "reduce-overhead" if options.device == "cuda" else None
        call = torch.compile(call, fullgraph=size == 1, mode=mode)
    rows = slice(rank * options.batch // size, (rank + 1) * options.batch // size)
    rng, times = np.random.default_rng(options.seed), []
    began, first = time.perf_counter(), 0  # of the steps that are timed together
    with progress_bar(kind, options.steps) as bar:
        for step in range(1, options.steps + 1):
            bits = loss_of(call, batch_of(text.train, text, rng, options)[rows], options)
            bits.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0 or step == options.steps:
                value, now = bits.item(), time.perf_counter()  # which waits for the GPU
                times.append((now - began) / (step - first))
                bar.show(step, (step, value, np.nan), options.batch * options.length)
                began, first = now, step
    rng = np.random.default_rng(0)  # the same held-out text for each
    with torch.no_grad():
        held_out = [
            loss_of(call, batch_of(text.held_out, text, rng, options), options).item()
            for _ in range(options.held_out_batches)
        ]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ms = 1000 * float(np.median(times))
    return {"model": kind, "parameters": parameters, "ms": ms, "bits": float(np.mean(held_out))}


def loss_of(model: Any, codes: torch.Tensor, options: Namespace) -> torch.Tensor:
    """Bits per character, codes being (batch, length + 1)."""
    with torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.amp):
        logits = model(codes[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), codes[:, 1:].flatten()) / log(2)


def batch_of(part: np.ndarray, text: Text, rng: Any, options: Namespace) -> torch.Tensor:
    """Pieces of the text from anywhere, (batch, length + 1)."""
    starts = rng.integers(part.size - options.length, size=(options.batch, 1))
    codes = text.code_of[part[starts + np.arange(options.length + 1)]]
    return torch.from_numpy(codes).to(options.device).long()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train each model and print the table; gives its rows."""
    options = parse(arguments)
    try:
        return train_all(options, sys.argv[1:] if arguments is None else arguments)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"torch_gpt: {error}")


def train_all(options: Namespace, given: list[str]) -> list[dict[str, Any]]:
    began = time.perf_counter()
    with all_ranks() as (rank, size):
        if options.batch % size:
            raise ValueError(f"--batch takes a multiple of the {size} ranks, got {options.batch}")
        text = open_text(options.text)
        check_length(text, options.batch, options.length)
        rows = [train(kind, text, options) for kind in ("dense", "sparse", "wide")]
    if rank:  # the first one tells
        return rows
    print(f"{text.name}: {options.steps} steps of {options.batch} x {options.length} characters")
    print(f"{'model':8}{'parameters':>12}{'ms a step':>12}{'bits per character, held out':>31}")
    for row in rows:
        print(f"{row['model']:8}{row['parameters']:12,}{row['ms']:12.1f}{row['bits']:31.3f}")
    if options.json:
        card = device.card() if options.device == "cuda" else "CPU"
        of = in_a_list(versions_of("numbsparse", "numba", "numba-cuda", "torch"))
        start = f"torchrun --nproc-per-node {size}" if size > 1 else "python"
        about = {
            "machine": f"{size} x {card}; {of}",
            "command": f"{start} examples/torch_gpt.py {shlex.join(given)}",
            "text": text.identity,
            "took": time.perf_counter() - began,
            "rows": rows,
        }
        name = f"ranks {size}, seed {options.seed}{', compiled' * options.compile}"
        results.save(options.json, {name: about})
    return rows


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", help="a file such as enwik8, or a folder; default: Python's standard library")
    add("--width", type=positive, default=256, help="of the model (%(default)s)")
    add("--layers", type=positive, default=4, help="(%(default)s)")
    add("--density", type=share, default=0.25, help="of the MLPs (%(default)s)")
    add("--batch", type=positive, default=16, help="pieces of text a step (%(default)s)")
    add("--length", type=positive, default=128, help="characters of each (%(default)s)")
    add("--steps", type=positive, default=300, help="(%(default)s)")
    add("--lr", type=positive_number, default=1e-3, help="learning rate (%(default)s)")
    add("--held-out-batches", type=positive, default=20, help="(%(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--amp", action="store_true", help="compute in bfloat16 by torch.autocast")
    add("--compile", action="store_true", help="by torch.compile, on a GPU in its graphs")
    add("--block-size", type=int, choices=(4, 8, 16, 32, 64, 128), default=32,
        help="of the MLPs' layouts (%(default)s)")  # fmt: skip
    add("--seed", type=from_0, default=0)
    add("--json", type=Path, help="file to put the table into; what it holds of others stays")
    options = parser.parse_args(arguments)
    if options.width % HEAD:
        parser.error(f"--width takes multiples of {HEAD}, got {options.width}")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json takes a file in a folder that is there, got {options.json}")
    return options


if __name__ == "__main__":
    main()
