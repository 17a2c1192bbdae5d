"""Models whose layers are split over ranks: each function runs on every rank, and alone."""

from contextlib import nullcontext

import numpy as np
from simulated_cards import as_cards

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import nn
from numbsparse.nn import functional as F

# Blocks of 4; and layers, steps of time and batch of the LSTM.
SIZES = {"cpu": (6, 2, 4, 4), "cuda": (2, 1, 2, 1)}


def patterns(n):
    recurrent = ns.patterns.random(n, n, 0.7, seed=n)
    recurrent[0] = False  # a line without blocks
    return recurrent, ns.patterns.random(n, 2 * n, 0.5, seed=1)


class Model(nn.Module):
    """A pair of linear layers, and LSTMs that another layer reads."""

    def __init__(self, dtype, split, group=None, size="cpu", peers=False):
        super().__init__()
        how, (n, layers, *_) = {"block_size": 4, "dtype": dtype}, SIZES[size]
        recurrent, across = patterns(n)
        up = nn.Linear(4 * n, 8 * n, layout=across, seed=0, **how)
        down = nn.Linear(8 * n, 4 * n, layout=across.T, seed=1, **how)
        rnn = nn.LSTM(4 * n, 4 * n, layers, layout=recurrent, seed=2, **how)
        wide = nn.Linear(4 * n, 8 * n, layout=across, seed=3, bias=False, **how)
        narrow = nn.Linear(8 * n, 8, seed=4, **how)
        if split:
            up = dist.ColumnLinear(up, group, gather_output=False)
            down = dist.RowLinear(down, group)
            rnn = dist.SplitLSTM(rnn, group, peer_memory=peers)
            wide = dist.ColumnLinear(wide, group)
            narrow = dist.RowLinear(narrow, group, split_input=False)
        self.up, self.down, self.rnn, self.wide, self.narrow = up, down, rnn, wide, narrow

    def forward(self, x, state=None):
        y, state = self.rnn(self.down(F.relu(self.up(x))), state)
        return self.narrow(self.wide(y)), state


class Small(Model):
    """Of the LSTM alone: simulated kernels are slow."""

    def forward(self, x, state=None):
        return self.rnn(x, state)


def part(whole, group):
    """A rank's part of the last axis."""
    n = whole.shape[-1] // group.size
    return whole[..., group.rank * n : (group.rank + 1) * n]


def trained(split, dtype, place="cpu", steps=3, size="cpu", pairs=False, peers=False):
    """Losses, the state at the end, the gradient of x, and the whole weights.

    Of `pairs` each splits the layers, and has its part of the batch. `peers` are two ranks whose
    simulated GPUs exchange h by each other's memory.
    """
    n, layers, time, batch = SIZES[size]
    with dist.init("sockets", 30.0) as everyone, as_cards(everyone) if peers else nullcontext():
        group = everyone.split(everyone.rank // 2) if pairs else everyone
        alike = everyone.split(everyone.rank % 2 if pairs else everyone.rank)
        rows = np.split(np.arange(batch), alike.size)[alike.rank]
        model = (Model if size == "cpu" else Small)(dtype, split, group, size, peers).to(place)
        dist.DataParallel(model, alike)
        optimizer = nn.optim.Adam(model.parameters(), lr=0.01)

        def step(x, h, c):
            x = ns.Tensor(x, requires_grad=True)
            y, (h, c) = model(x, (ns.Tensor(h), ns.Tensor(c)))
            loss = F.mse_loss(y, x[..., :8].detach()) + (h * h).mean()
            model.zero_grad()
            loss.backward()
            if size == "cpu":  # simulated steps are slow
                optimizer.step()
            return loss, h, c, x.grad

        rng, put = (
            np.random.default_rng(0),
            ns.to_device if place == "cuda" else np.ascontiguousarray,
        )
        h, c = (rng.standard_normal((layers, batch, 4 * n)).astype(dtype) for _ in "hc")
        h, c = h[:, rows], (part(c, group) if split else c)[:, rows]
        given, losses = (put(h), put(c)), []
        for _ in range(steps):
            x = put(rng.standard_normal((time, batch, 4 * n))[:, rows].astype(dtype))
            loss, *ends, dx = step(x, *given)
            given = tuple(a.data for a in ends)
            losses.append(float(alike.all_reduce(np.float64(loss.item()), "mean")))
        h, c = (a.numpy() for a in ends)
        weights = [
            layer.whole(name).toarray() if split else own.data.toarray()
            for layer, name, own in weights_of(model, split)
        ]
        c = np.concatenate(group.all_gather(c[None]), axis=-1) if split else c
        return losses, h, c, dx.numpy(), weights


def weights_of(model, split):
    for layer in (model.up, model.down, model.wide, model.narrow):
        yield layer, "weight", layer.weight
    for i in range(model.rnn.n_layers if split else len(model.rnn.layers)):
        for name in ("weight_ih", "weight_hh"):
            own = None if split else getattr(model.rnn.layers[i], name)
            yield model.rnn, f"{name}_l{i}", own


def refused(what):
    """What is said of layers that cannot be split."""
    with dist.init("sockets", 30.0) as group:
        make = {
            "columns": lambda: dist.ColumnLinear(nn.Linear(8, 12, block_size=4), group),
            "rows": lambda: dist.RowLinear(nn.Linear(10, 8, block_size=4), group),
            "gate": lambda: dist.ColumnLinear(nn.Linear(8, 8, block_size=4, gate=True), group),
            "units": lambda: dist.SplitLSTM(nn.LSTM(8, 12, block_size=4), group),
            "peers": lambda: dist.SplitLSTM(nn.LSTM(8, 8, block_size=4), group, peer_memory=True),
            "norm": lambda: dist.SplitLSTM(nn.LSTM(8, 8, block_size=4, layer_norm=True), group),
        }[what]
        try:
            make()
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "taken"


def twice_differentiated():
    """The gradient of a gradient through a split pair, and an LSTM's refusal."""
    with dist.init("sockets", 30.0) as group:
        model = Model("float64", True, group)
        x = ns.Tensor(np.linspace(-1, 1, 48).reshape(2, 24), requires_grad=True)
        y = model.down(F.tanh(model.up(x)))
        (dx,) = ns.grad((y * y).sum(), [x], create_graph=True)
        (ddx,) = ns.grad((dx * dx).sum(), [x])
        sequence = ns.Tensor(np.ones((2, 1, 24)), requires_grad=True)
        try:
            ns.grad(model.rnn(sequence)[0].sum(), [sequence], create_graph=True)
        except NotImplementedError as error:
            return ddx.numpy(), str(error)
    return None
