"""Runs of LSTM steps by the kernels that stream the recurrent weight, where these serve."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.kernels.lstm.cell import WARPS
from numbsparse.ops.create import zeros
from numbsparse.ops.elementwise import copy
from numbsparse.ops.matmul import index_beside

FEW_STEPS = 2 if SIMULATED else 8


class Streamed:
    """A recurrent weight and its kernels, which say what arrays they take."""

    PARTS = WARPS  # of the gradient of the bias

    def __init__(self, values: DeviceArray, index: Any):
        self._weight = values, index

    def forward(self, first: int, last: int, *arrays: Any) -> None:
        """h[first + 1] to h[last]."""
        if first >= last:
            return
        kernels = import_module("numbsparse.kernels.lstm.forward_steps")
        values, index = self._weight
        if values.itemsize == 4:
            values = import_module("numbsparse.kernels.lstm.turned_blocks").turned_blocks(values)
        arrays = tuple(map(_aligned, arrays))
        kernels.forward(*arrays, values, index, first, last, _counters(last - first))

    def backward(self, first: int, last: int, *arrays: Any) -> None:
        """dgates[first - 2] to dgates[last - 1]."""
        if first <= last:
            return
        kernels = import_module("numbsparse.kernels.lstm.backward_steps")
        arrays = tuple(map(_aligned, arrays))
        kernels.backward(*arrays, *self._weight, first, last, _counters(first - last))


def streamed(weight_hh: BlockSparse, hs: Any, precision: str) -> Streamed | None:
    """The kernels for this weight and states (time + 1, batch, units), or None where none serve.

    float32 has them for "high" precision, and for so many steps that a copy of the weight pays.
    """
    if not isinstance(hs, DeviceArray) or weight_hh.is_transposed:
        return None
    if hs.itemsize == 4 and (precision != "high" or hs.shape[0] <= FEW_STEPS):
        return None
    deal = import_module("numbsparse.kernels.lstm.deal")
    values, index = weight_hh.values, index_beside(weight_hh.stored_layout, hs)
    return Streamed(values, index) if deal.serves(values, index, *hs.shape[1:]) else None


def _aligned(array: DeviceArray | None) -> DeviceArray | None:
    """At a multiple of 16 bytes; what is written to was made by us and is."""
    return array if array is None or array.address % 16 == 0 else copy(array)


def _counters(steps: int) -> DeviceArray:
    return zeros((2 * steps,), "float32", "cuda").view("int32")
