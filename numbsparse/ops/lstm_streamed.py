"""Runs of many LSTM steps by one kernel, where there is one that serves."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.kernels import times
from numbsparse.kernels.lstm import GATES, WARPS
from numbsparse.kernels.parts.plans import planned
from numbsparse.layout import Index, Layout
from numbsparse.ops.create import zeros
from numbsparse.ops.edge import inside
from numbsparse.ops.elementwise import copy, gapless, write
from numbsparse.ops.index import index_beside

FEW_STEPS = 2 if SIMULATED else 8
# Blocks of the inputs' weight, to those of the recurrent one: so many are read again each step in
# less time than all products are written and read in: 64 rows of 12,288 and 18,432 units (H200)
# took forward 0.86 to 0.93 of the time, training 0.94 to 0.99.
MOST_INPUTS = 1.0 if SIMULATED else 0.25
LAUNCHES = 1.25  # microseconds: of a step by itself beyond its products, less those of a run's


class OnCores:
    """A recurrent weight and its kernels for CPU cores, which say what arrays they take."""

    parts = 1  # of the gradient of the bias

    def __init__(self, values: np.ndarray, index: Any):
        self._weight = values, index

    def takes(self, x: np.ndarray, weight: BlockSparse) -> bool:
        """Inputs are multiplied for all steps at once."""
        return False

    def forward(self, *arrays: Any, inputs: None = None) -> None:
        """All steps, from the first h and c on."""
        home("cpu_steps").forward(*arrays, *self._weight)

    def backward(self, *arrays: Any) -> None:
        """All steps but the last, from its gradient on."""
        home("cpu_steps").backward(*arrays, *self._weight)


class Streamed:
    """A recurrent weight and the kernels that stream it, on a GPU."""

    def __init__(self, weight: BlockSparse, index: Any, batch: int, exact: bool):
        self._weight, self._index, self._units = weight, index, weight.shape[0]
        self._size, self._exact = weight.block_size, exact
        tile = home("deal").rows_of_tile(batch, self._units, exact)
        self.parts = WARPS * -(-batch // tile)  # of the gradient of the bias

    def takes(self, x: DeviceArray, weight: BlockSparse) -> bool:
        """Whether `forward` multiplies these inputs itself: whole blocks, far fewer than of h."""
        deal = home("deal")
        values, index = weight.values, index_beside(weight.stored_layout, x)
        return (
            not weight.is_transposed
            and self._size == deal.B
            and not self._exact
            and x.shape[2] % deal.B == 0
            and 0 < values.shape[0] <= self._weight.values.shape[0] * MOST_INPUTS
            and values.address % 16 == 0
            and deal.planned(index, deal.in_fours)[0]
        )

    def forward(
        self, gates: Any, bias: Any, kept: Any, hs: Any, cs: Any, inputs: Any = None
    ) -> None:
        """All steps, from the first h and c on; `inputs` to be multiplied here are x and its
        weight."""
        kernels, counters = home("forward_steps"), self._counters(gates.shape[0])
        # Units beyond the last are zeros of h, and NaN * 0 is NaN.
        values = self._joined(inside(self._weight, units=self._units), False)
        index = self._index
        if inputs is not None:
            x, weight = inputs
            blocks = inside(weight, units=self._units) if self._missing else weight.values
            inputs = _aligned(gapless(x)), _as_operands(blocks)
            (layout,) = planned(index, _stacked, weight.stored_layout)
            index = index_beside(layout, x)
        else:
            self._clear(gates)
        if self._missing:
            bias = copy(bias)
            self._clear(bias)
        states = [self._wide(a) for a in (kept, hs, cs)]
        arrays = map(_aligned, (gates, bias, *states))
        values = values if self._exact else _as_operands(values)
        kernels.forward(*arrays, values, index, counters, inputs, self._size, self._exact)
        self._narrow(states[1:], (hs, cs))
        self._clear(gates)

    def backward(
        self, gates: Any, kept: Any, cs: Any, dy: Any, dgates: Any, dc: Any, dbias: Any
    ) -> None:
        """All steps but the last, from its gradient on."""
        kernels, counters = home("backward_steps"), self._counters(gates.shape[0])
        self._clear(gates)
        kept, cs, dy, of_c = (self._wide(a) for a in (kept, cs, dy, dc))
        arrays = map(_aligned, (gates, kept, cs, dy, dgates, of_c, dbias))
        # Columns of rows beyond the last unit are stored nowhere.
        values = self._joined(self._weight.values, True)
        kernels.backward(*arrays, values, self._index, counters, self._size, self._exact)
        self._narrow([of_c], [dc])

    def _joined(self, values: DeviceArray, transposed: bool) -> DeviceArray:
        """Blocks of the kernels' size."""
        if self._size == home("deal").B:
            return values
        weights, how = home("weights"), (self._size, transposed, values.itemsize)
        joined: DeviceArray = weights.as_blocks(
            gapless(values), *planned(self._index, weights.parts_of, *how)
        )
        return joined

    @property
    def _missing(self) -> int:
        """Units to the next multiple that the kernels take; zeros are there for these."""
        return -self._units % home("deal").UNITS

    def _wide(self, state: DeviceArray | None) -> Any:
        if state is None or not self._missing:
            return state
        wide = zeros((*state.shape[:-1], self._units + self._missing), state.dtype, "cuda")
        write(wide[..., : self._units], state)
        return wide

    def _narrow(self, wide: Any, own: Any) -> None:
        """What the kernels made of states, to these."""
        for a, b in zip(wide, own, strict=True):
            if a is not b:
                write(b, a[..., : self._units])

    def _clear(self, gates: DeviceArray) -> None:
        """Zeros for gates, or their bias, beyond the last unit, where zeros are missing."""
        if self._missing:
            blocks = gates.reshape(*gates.shape[:-1], -1, GATES, self._size)
            beyond = blocks[..., -1, :, self._units % self._size :]
            write(beyond, zeros(beyond.shape, gates.dtype, "cuda"))

    def _counters(self, steps: int) -> DeviceArray:
        """A zero for each step and tile."""
        return zeros((steps * self.parts // WARPS,), "float32", "cuda").view("int32")


def streamed(weight_hh: BlockSparse, hs: Any, precision: str) -> Streamed | OnCores | None:
    """The kernels for this weight and states (time + 1, batch, units), or None where none serve.

    On a GPU float32 has them for so many steps that a copy of the weight pays.
    """
    if weight_hh.is_transposed:
        return None
    if not isinstance(hs, DeviceArray):
        values, index = weight_hh.values, weight_hh.stored_layout.index
        return OnCores(values, index) if home("cpu_steps").serves(values, *hs.shape[1:]) else None
    if (hs.itemsize == 4 or weight_hh.block_size != 32) and hs.shape[0] <= FEW_STEPS:
        return None
    exact = hs.itemsize == 4 and precision != "high"
    values, index = weight_hh.values, index_beside(weight_hh.stored_layout, hs)
    serves = home("deal").serves(values, index, *hs.shape[1:])
    serves = serves and _joining_pays(weight_hh, hs, precision)
    return Streamed(weight_hh, index, hs.shape[1], exact) if serves else None


def _joining_pays(weight: BlockSparse, hs: DeviceArray, precision: str) -> bool:
    """Whether steps are shorter by blocks that are put together of small ones; of others, yes.

    Of 23 drawn LSTMs the choice took 1.007 times as long as the better way before it counted the
    places that run, 1.0015 since then, 1.035 at most (H200).
    """
    deal, size, exact = home("deal"), weight.block_size, hs.itemsize == 4 and precision != "high"
    if size >= deal.B or exact:
        return size >= deal.B
    _, batch, units = hs.shape
    ring = home("producers").ring_for(False, hs.itemsize, False, batch, units, size)
    layout, places = weight.stored_layout, deal.places() // (deal.BLOCKS // ring.BLOCKS)
    index = index_beside(layout, hs)
    (most,) = planned(index, _products_take, layout, size, hs.dtype, batch, precision)
    most = (most + LAUNCHES) / deal.A_READ[ring.BLOCKS]  # reads
    if 2 * weight.values.size // (GATES * deal.B**2) > most * places:  # hardly any zeros between
        return False
    (reads,) = planned(index, deal.ends, places, size, hs.itemsize, -(-batch // ring.tile))
    return bool(reads <= most)


def _products_take(
    index: Index, layout: Layout, size: int, dtype: np.dtype, batch: int, precision: str
) -> tuple[float]:
    """Microseconds that both products of a step are expected to take by themselves."""
    of = size, dtype, batch, precision, layout
    both = (times.expected(product, *of) for product in ("forward", "input_grad"))
    return (sum(min(found.values(), default=0.0) for found in both),)


def _stacked(index: Index, below: Layout) -> tuple[Layout]:
    """The layout of a weight above another one."""
    pattern = np.zeros((index.rows.indptr.size - 1, index.columns.indptr.size - 1), bool)
    pattern[index.block_rows, index.block_columns] = True
    return (Layout(np.concatenate([pattern, below.pattern])),)


def _as_operands(values: DeviceArray) -> DeviceArray:
    """Blocks as the tensor cores take them: of tf32 those that are transposed."""
    if values.itemsize == 2:
        return values
    return home("forward_steps").transposed_blocks(values)


@cache
def home(name: str) -> ModuleType:
    """A file of kernels; loaded when first needed."""
    return import_module(f"numbsparse.kernels.lstm.{name}")


def _aligned(array: DeviceArray | None) -> DeviceArray | None:
    """At a multiple of 16 bytes, as outputs, which are allocated here, always are."""
    return array if array is None or array.address % 16 == 0 else copy(array)
