"""A small model that is rewired, and what its blocks are to be."""

import numpy as np
from conftest import host

import numbsparse as ns
from numbsparse import nn
from numbsparse.nn import functional as F
from numbsparse.nn import optim
from numbsparse.nn.utils import Rewiring


def model_of(density=0.4, sizes=(40, 48, 20), **how):
    """Features that end within a block."""
    layers = []
    for i in range(2):
        grid = (-(-sizes[i] // 4), -(-sizes[i + 1] // 4))
        pattern = ns.patterns.random(*grid, density, seed=i)
        layers.append(nn.Linear(*sizes[i : i + 2], layout=pattern, block_size=4, seed=i, **how))
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def weights_of(model):
    return [model[0].weight, model[2].weight]


def flats(weight):
    return set(weight.data.layout.flat_indices.tolist())


def norms_by_block(weight):
    """By flat index."""
    norms = host(weight.data.block_norms())
    return dict(zip(weight.data.layout.flat_indices.tolist(), norms.tolist(), strict=True))


def batch(step, place="cpu", width=40):
    x = np.random.default_rng(step).standard_normal((6, width), dtype=np.float32)
    return ns.to_device(x) if place == "cuda" else x


def descend(model, step, place="cpu"):
    y = model(batch(step, place, model[0].weight.shape[0]))
    model.zero_grad()
    F.mean(y * y).backward()


def train(parts, steps, place="cpu"):
    for step in steps:
        descend(parts["model"], step, place)
        parts["rewiring"].step()
        parts["optimizer"].step()
        parts["average"].step()


def begun(place="cpu", first=0.4, kind=Rewiring, **how):
    # Simulated threads are slow.
    model = model_of(first, (12, 16, 8) if place == "cuda" else (40, 48, 20)).to(place)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    average = optim.ExponentialMovingAverage(model.parameters(), 0.5)
    rewiring = kind(model, remap=[optimizer, average], seed=0, **how)
    return {"rewiring": rewiring, "model": model, "optimizer": optimizer, "average": average}


def dense_gradients(model, x):
    """Of both weights, in float64, for mean(y * y)."""
    one, two = (host(w.data).astype(np.float64) for w in weights_of(model))
    biases = [host(layer.bias.data).astype(np.float64) for layer in (model[0], model[2])]
    h = np.tanh(x @ one + biases[0])
    y = h @ two + biases[1]
    dy = 2 * y / y.size
    dh = dy @ two.T * (1 - h**2)
    return [x.T @ dh, h.T @ dy]


def block_norms(dense, grid):
    padded = np.zeros((grid[0] * 4, grid[1] * 4))
    padded[: dense.shape[0], : dense.shape[1]] = dense
    return np.sqrt((padded**2).reshape(grid[0], 4, grid[1], 4).sum((1, 3))).reshape(-1)
