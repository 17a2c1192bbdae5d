"""Layers wider than a card: of each weight a rank has some of the block columns, or block rows.

What follows from all of x and some columns of w is some columns of y; of some columns of x and the
same rows of w it is a term of y, and all ranks' terms are summed. Four functions, each with another
one for its gradient, move arrays between "all ranks have the same" and "each has a part":
`replicate` and `total`, `gather` and `part`.

After M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019, section 3.
"""

from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, record
from numbsparse.block_sparse import BlockSparse
from numbsparse.distributed.exchange import Exchange, PeerExchange
from numbsparse.distributed.group import Group
from numbsparse.distributed.start import init
from numbsparse.dtypes import check_kind
from numbsparse.nn import LSTM, Linear, Module, Parameter
from numbsparse.nn import functional as F
from numbsparse.nn.recurrent import checked_state, checked_steps
from numbsparse.patterns.checks import flag


def replicate(x: Any, group: Group) -> Tensor:
    """x, the same on all ranks, each of which goes on with it in another way."""
    x = as_tensor(x)
    return record(x.data, (x, lambda dy, y: total(dy, group)))


def total(x: Any, group: Group) -> Tensor:
    """The sum of the ranks' x, on all of them."""
    x = as_tensor(x)
    return record(group.all_reduce(x.data), (x, lambda dy, y: replicate(dy, group)))


def gather(x: Any, group: Group) -> Tensor:
    """The ranks' x beside each other along the last axis, on all of them."""
    x = as_tensor(x)
    whole = ops.zeros((*x.shape[:-1], group.size * x.shape[-1]), x.dtype, x.device)
    return record(Exchange(group).gather(x.data, whole), (x, lambda dy, y: part(dy, group)))


def part(x: Any, group: Group) -> Tensor:
    """This rank's part of the last axis of x, which is the same on all ranks."""
    x = as_tensor(x)
    return record(ops.copy(Exchange(group).part(x.data)), (x, lambda dy, y: gather(dy, group)))


class Split(Module):
    """What split layers have in common: a layer of which each rank keeps a part."""

    def __init__(self, group: Group | None):
        super().__init__()
        self.group = init() if group is None else group
        check_kind("group", self.group, Group, "a numbsparse Group")
        self._layouts: dict[str, Any] = {}  # of whole weights, with how they are cut

    def keep(self, name: str, weight: Tensor, axis: int, argument: str) -> None:
        """Make the parameter of this name: this rank's block rows (axis 0) or columns (1)."""
        w: Any = weight.data
        size, blocks = self.group.size, w.layout.shape[axis]
        if w.is_transposed or w.shape[axis] != blocks * w.block_size or blocks % size:
            raise ValueError(
                f"{argument} takes a multiple of {size} ranks x {w.block_size} features along the "
                f"axis that is split, got {w.shape[axis]}"
            )
        first, after = (blocks // size * (self.group.rank + i) * w.block_size for i in (0, 1))
        own = w[:, first:after] if axis else w[first:after]
        self._layouts[name] = w.layout, w.shape, axis
        setattr(self, name, _like(weight, own.copy()))

    def whole(self, name: str) -> BlockSparse:
        """A weight of all ranks, on the CPU of each: for a checkpoint, say."""
        own, (layout, shape, axis) = getattr(self, name).data.to("cpu"), self._layouts[name]
        counts = self.group.share(own.n_blocks)
        padded = np.zeros((max(counts), *own.values.shape[1:]), own.dtype)
        padded[: own.n_blocks] = own.data
        all_parts = self.group.all_gather(padded[None])
        where = layout.index.block_columns if axis else layout.index.block_rows
        of_rank = where // (layout.shape[axis] // self.group.size)
        values = np.empty((layout.n_blocks, *own.values.shape[1:]), own.dtype)
        for rank, (n, values_of) in enumerate(zip(counts, all_parts, strict=True)):
            values[of_rank == rank] = values_of[:n]
        return BlockSparse(values, layout, shape=shape)


def _like(whole: Tensor, values: Any) -> Parameter:
    """A parameter of these values, frozen if `whole` is."""
    own = Parameter(values)
    own.requires_grad = whole.requires_grad
    return own


class _SplitLinear(Split):
    """Of a linear layer block columns (axis 1) or block rows (0), without its bias."""

    weight: Parameter
    bias: Parameter | None = None

    def __init__(self, linear: Linear, group: Group | None, axis: int):
        super().__init__(group)
        if not isinstance(linear, Linear) or linear.gate is not None:
            raise TypeError(f"linear takes an nn.Linear without gate, got {linear!r}")
        self.precision = linear.precision
        self.keep("weight", linear.weight, axis, ("in_features", "out_features")[axis])


class ColumnLinear(_SplitLinear):
    """A `nn.Linear` of which each rank has some block columns, and so some of the outputs.

    Parameters
    ----------
    linear : nn.Linear, the same on all ranks, as by a seed; without gate
        Its output features are a multiple of the block size times the ranks.
    group : Group, optional
    gather_output : bool
        Whether y is that of all ranks, or this rank's part, as `RowLinear` takes it.

    Attributes
    ----------
    weight, bias : Parameters, this rank's part
    whole("weight") : the weight of all ranks, on the CPU

    Of gradients that are clipped by their norm, each rank sees its own part alone.

    Examples
    --------
    >>> import numpy as np, numbsparse.distributed as dist
    >>> from numbsparse import nn
    >>> layer = dist.ColumnLinear(nn.Linear(64, 128, seed=0))  # of one process: all of it
    >>> layer(np.ones((2, 64), np.float32)).shape
    (2, 128)
    """

    def __init__(self, linear: Linear, group: Group | None = None, *, gather_output: bool = True):
        super().__init__(linear, group, 1)
        self.gather_output = flag("gather_output", gather_output)
        if linear.bias is not None:
            own = Exchange(self.group).part(linear.bias.data)
            self.bias = _like(linear.bias, ops.copy(own))

    def forward(self, x: Any) -> Tensor:
        x = replicate(x, self.group)
        y = F.linear(x, self.weight, self.bias, precision=self.precision)
        return gather(y, self.group) if self.gather_output else y


class RowLinear(_SplitLinear):
    """A `nn.Linear` of which each rank has some block rows: it sums what the ranks make of theirs.

    Parameters
    ----------
    linear : nn.Linear, the same on all ranks; without gate
        Its input features are a multiple of the block size times the ranks.
    group : Group, optional
    split_input : bool
        Whether x is this rank's part, as of a `ColumnLinear` without `gather_output`, or all of it.

    Examples
    --------
    >>> import numpy as np, numbsparse.distributed as dist
    >>> from numbsparse import nn
    >>> up, down = nn.Linear(64, 256, seed=0), nn.Linear(256, 64, seed=1)
    >>> pair = nn.Sequential(
    ...     dist.ColumnLinear(up, gather_output=False), nn.ReLU(), dist.RowLinear(down)
    ... )
    >>> pair(np.ones((2, 64), np.float32)).shape
    (2, 64)
    """

    def __init__(self, linear: Linear, group: Group | None = None, *, split_input: bool = True):
        super().__init__(linear, group, 0)
        self.split_input = flag("split_input", split_input)
        self.bias = None if linear.bias is None else _like(linear.bias, ops.copy(linear.bias.data))

    def forward(self, x: Any) -> Tensor:
        x, features = as_tensor(x), self._layouts["weight"][1][0]
        if not self.split_input:
            if x.shape[-1:] != (features,):
                raise ValueError(f"x takes the shape (..., {features}), got {x.shape}")
            x = part(x, self.group)
        y = total(F.linear(x, self.weight, precision=self.precision), self.group)
        return y if self.bias is None else y + self.bias


class SplitLSTM(Split):
    """An `nn.LSTM` of which each rank has some units: all their gates, and all that they read.

    h is exchanged in each time step: y and the h of a state are those of all units, and the c of a
    state this rank's part.

    Parameters
    ----------
    lstm : nn.LSTM, the same on all ranks, without layer norm and update dropout
        Its units are a multiple of the block size times the ranks.
    group : Group, optional
    peer_memory : bool
        Whether the GPUs of one host write h to each other's memory, in the place of NCCL.

    Examples
    --------
    >>> import numpy as np, numbsparse.distributed as dist
    >>> from numbsparse import nn
    >>> lstm = dist.SplitLSTM(nn.LSTM(8, 64, seed=0))
    >>> y, (h, c) = lstm(np.zeros((5, 2, 8), np.float32))
    >>> y.shape, c.shape
    ((5, 2, 64), (1, 2, 64))
    """

    weight_ih_l0: Parameter

    def __init__(self, lstm: LSTM, group: Group | None = None, *, peer_memory: bool = False):
        super().__init__(group)
        self.peer_memory = flag("peer_memory", peer_memory)
        self._peers: PeerExchange | None = None
        if peer_memory and self.group.backend != "nccl":
            raise ValueError(
                "peer_memory takes GPUs of one host and the backend nccl, got "
                f"{self.group.size} ranks with {self.group.backend}"
            )
        plain = isinstance(lstm, LSTM) and not any(
            layer.gain is not None or layer.update_dropout for layer in lstm.layers
        )
        if not plain:
            raise TypeError(
                f"lstm takes an nn.LSTM without layer_norm and update_dropout, got {lstm!r}"
            )
        self.hidden_size, self.n_layers = lstm.hidden_size, len(lstm.layers)
        features = self.group.size * lstm.layers[0].weight_hh.data.block_size
        if lstm.hidden_size % features:
            raise ValueError(f"hidden_size takes a multiple of {features}, got {lstm.hidden_size}")
        self.precision = lstm.layers[0].precision
        self.biases = []
        for i, layer in enumerate(lstm.layers):
            for name in ("weight_ih", "weight_hh"):
                self.keep(f"{name}_l{i}", getattr(layer, name), 1, "hidden_size")
            own = Exchange(self.group).part(layer.bias.data)
            self.biases.append(_like(layer.bias, ops.copy(own)))

    def forward(self, x: Any, state: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x (time, batch, input_size) -> y (time, batch, hidden_size), (h, c)."""
        weight, own = self.weight_ih_l0, self.hidden_size // self.group.size
        y, ends = checked_steps(x, weight.shape[0]), []
        if state is not None:
            h_shape, c_shape = ((self.n_layers, y.shape[1], n) for n in (self.hidden_size, own))
            state = checked_state(y, state, h_shape, weight, c_shape)
        exchange = self._exchange(y.shape[1] * own * y.dtype.itemsize)
        for i in range(self.n_layers):
            h, c = self.zero_state(y) if state is None else (each[i] for each in state)
            weights = getattr(self, f"weight_ih_l{i}"), getattr(self, f"weight_hh_l{i}")
            given = replicate(y, self.group), *weights, self.biases[i], replicate(h, self.group), c
            y, *end = F.lstm(*given, precision=self.precision, exchange=exchange)
            ends.append(end)
        h, c = (F.stack(parts) for parts in zip(*ends, strict=True))
        return y, (h, c)

    def _exchange(self, nbytes: int) -> Exchange:
        if not self.peer_memory:
            return Exchange(self.group)
        if self._peers is None or self._peers.nbytes < nbytes:
            self._peers = PeerExchange(self.group, nbytes)
        return self._peers

    def zero_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(h, c) of one layer, h of all units and c of this rank's."""
        batch, wide = x.shape[1], ops.state_dtype(x.dtype)
        sizes = (self.hidden_size, x.dtype), (self.hidden_size // self.group.size, wide)
        h, c = (Tensor(ops.zeros((batch, n), dtype, x.device)) for n, dtype in sizes)
        return h, c
