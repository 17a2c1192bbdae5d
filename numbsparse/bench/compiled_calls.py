"""Calls whose kernels stand for all: each rung, product, dtype, block size and order somewhere.

A call is named by what a user would say of it, so that its name outlives any change of files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numbsparse import nn, patterns
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, to_device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import ladder
from numbsparse.layout import Layout
from numbsparse.nn import functional as F
from numbsparse.ops import index_beside

FEATURES, DENSITY = 4096, 0.1
SIDE, CHANNELS = 32, 512  # of the images of convolutions
STEPS, SEQUENCES = 4, 64


class Product(NamedTuple):
    """A product of the ladder on 4096 x 4096 features, a tenth of the blocks kept."""

    rung: str
    product: str  # "forward", "input_grad", "weight_grad"
    numbers: str  # a dtype, or "float32, high"
    block_size: int
    batch: int
    order: str = "batch-major"

    def __str__(self) -> str:
        what = f"matmul {self.rung} {self.product} {self.numbers}"
        return f"{what}, B = {self.block_size}, batch {self.batch}, {self.order}"

    def run(self) -> None:
        dtype, precision = _in_words(self.numbers)
        n = FEATURES // self.block_size
        w = _weight(Layout(patterns.random(n, n, DENSITY, seed=0)), self.block_size, dtype)
        x, y = (_matrix((self.batch, FEATURES), dtype, self.order) for _ in range(2))
        if self.product == "weight_grad":
            F.sddmm(x.T, y, w, kernel=self.rung, precision=precision)
            return
        w = w if self.product == "forward" else w.T
        operands, out = ((x, w), y) if self.order == "batch-major" else ((w.T, x.T), y.T)
        F.matmul(*operands, out=out, kernel=self.rung, precision=precision)


class Step(NamedTuple):
    """The forward product by a step of the taught ladder."""

    name: str
    block_size: int

    def __str__(self) -> str:
        return f"ladder {self.name}, B = {self.block_size}"

    def run(self) -> None:
        dtype = as_dtype("float32" if self.name < "s08" else "float16")
        n = FEATURES // self.block_size
        w = _weight(Layout(patterns.random(n, n, DENSITY, seed=0)), self.block_size, dtype)
        x, y = (_empty((FEATURES, FEATURES), dtype) for _ in range(2))
        ladder.step(self.name).forward(x, w.data, index_beside(w.layout, x), y)


class Conv(NamedTuple):
    """A 3 x 3 convolution of 32 x 32 images."""

    rung: str
    product: str
    numbers: str
    block_size: int

    def __str__(self) -> str:
        return f"conv {self.rung} {self.product} {self.numbers}, B = {self.block_size}"

    def run(self) -> None:
        dtype, precision = _in_words(self.numbers)
        n = CHANNELS // self.block_size
        layout = Layout(patterns.taps(patterns.random(n, n, DENSITY, seed=0), (3, 3)))
        w = _weight(layout, self.block_size, dtype)
        x, dy = (_empty((8, SIDE, SIDE, CHANNELS), dtype) for _ in range(2))
        how: Any = {"kernel_size": 3, "padding": 1, "kernel": self.rung, "precision": precision}
        if self.product == "weight_grad":
            F.conv_weight_grad(x, dy, w, **how)
        else:
            (F.conv if self.product == "forward" else F.conv_transpose)(x, w, **how)


class Recurrent(NamedTuple):
    """An LSTM over a few steps, forward and backward."""

    numbers: str
    units: int
    density: float
    norm: bool = False

    def __str__(self) -> str:
        norm = ", norm" * self.norm
        return f"LSTM {self.numbers}, {self.units} units, density {self.density}{norm}"

    def run(self) -> None:
        dtype, precision = _in_words(self.numbers)
        n = self.units // 32
        layout = patterns.random(n, n, self.density, seed=0)
        how: Any = {
            "layout": layout,
            "block_size": 32,
            "layer_norm": self.norm,
            "precision": precision,
        }
        lstm = nn.LSTM(64, self.units, seed=0, **how)
        for parameter in lstm.parameters():
            parameter.data = parameter.data.astype(dtype)
        lstm.to("cuda")
        output, _ = lstm(_empty((STEPS, SEQUENCES, 64), dtype))
        output.backward(_empty(output.shape, dtype))


def _products() -> list[Product]:
    """Each rung at the shapes that it is there for."""
    ladder = [
        Product(rung, product, "float32", 32, 4096)
        for rung in ("k1_naive", "k2_shared", "k3_registers", "k4_pipelined")
        for product in ("forward", "weight_grad")
    ]
    tensor_cores = [
        Product(rung, product, numbers, 32, 4096)
        for rung in ("k5_tensor_core", "k6_hopper")
        for product in ("forward", "input_grad", "weight_grad")
        for numbers in ("float16", "float32")
    ]
    orders = [
        Product(rung, product, numbers, 32, 4096, "feature-major")
        for rung in ("k5_tensor_core", "k6_hopper")
        for product in ("forward", "weight_grad")
        for numbers in ("bfloat16", "float32, high")
    ]
    wide = [
        Product("k6_hopper", product, "float16", size, 4096)
        for product in ("forward", "weight_grad")
        for size in (64, 128)
    ]
    small_blocks = [
        Product("k7_small_blocks", product, numbers, size, 4096, order)
        for product in ("forward", "weight_grad")
        for numbers, size, order in (
            ("float16", 8, "batch-major"),
            ("float16", 16, "feature-major"),
            ("float32", 8, "feature-major"),
            ("float32", 16, "batch-major"),
        )
    ]
    small_batches = [
        Product("k8_small_batch", product, numbers, size, batch, order)
        for product in ("forward", "weight_grad")
        for numbers, size, batch, order in (
            ("float32", 32, 32, "batch-major"),
            ("float32, high", 64, 16, "feature-major"),
            ("float16", 32, 32, "feature-major"),
            ("bfloat16", 8, 16, "batch-major"),
        )
    ]
    few = [
        Product("k8_small_batch", product, numbers, size, batch)
        for product, numbers, size, batch in (
            ("forward", "float16", 64, 64),
            ("forward", "float16", 8, 128),
            ("input_grad", "float32", 32, 128),
            ("weight_grad", "float16", 8, 128),
        )
    ]
    return ladder + tensor_cores + orders + wide + small_blocks + small_batches + few


def _steps() -> list[Step]:
    """Each step; those of wgmma with each block size."""
    return [
        Step(name, size)
        for name in ladder.NAMES
        for size in ((32, 64, 128) if name > "s10" else (32,))
    ]


def _convolutions() -> list[Conv]:
    return [
        Conv(rung, product, numbers, size)
        for rung, numbers, size in (
            ("k2_tensor_core", "float16", 32),
            ("k2_tensor_core", "float32", 16),
            ("k2_tensor_core", "float32", 64),
            ("k4_wgmma", "float16", 32),
            ("k4_wgmma", "float32", 64),
            ("k5_small_blocks", "float16", 8),
        )
        for product in ("forward", "input_grad", "weight_grad")
        if (rung, numbers, product) != ("k4_wgmma", "float32", "weight_grad")  # which is k2's
    ]


Call = Product | Step | Conv | Recurrent


def calls() -> dict[str, Call]:
    """By name."""
    recurrent = [
        Recurrent("float16", 2048, 0.1),
        Recurrent("float32", 2048, 0.1),
        Recurrent("float16", 18432, 0.03),
        Recurrent("float32, high", 2048, 0.1, norm=True),
    ]
    every: list[Call] = [*_products(), *_steps(), *_convolutions(), *recurrent]
    return {str(call): call for call in every}


def _in_words(numbers: str) -> tuple[np.dtype, str]:
    name, _, precision = numbers.partition(", ")
    return as_dtype(name), precision or "highest"


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
    return to_device(np.empty(shape, dtype))


def _matrix(shape: tuple[int, int], dtype: np.dtype, order: str) -> DeviceArray:
    return _empty(shape, dtype) if order == "batch-major" else _empty(shape[::-1], dtype).T


def _weight(layout: Layout, size: int, dtype: np.dtype) -> BlockSparse:
    return BlockSparse(_empty((layout.n_blocks, size, size), dtype), layout)
