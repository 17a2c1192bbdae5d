"""What the tests of numbsparse.torch share: layouts, and the same layers of torch, dense."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: see CONTRIBUTING.md")
nst = pytest.importorskip("numbsparse.torch")

import numbsparse as ns  # noqa: E402

RNG = np.random.default_rng(0)


def drawn(*shape, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
    return tensor.requires_grad_(grad)


def layout(rows, columns, density=0.4, seed=0):
    return ns.Layout(ns.patterns.random(rows, columns, density, seed=seed))


def grads(y, inputs, create_graph=False):
    """Of the sum of the squares of what a function gave, one result or several."""
    total = sum((part**2).sum() for part in (y if isinstance(y, tuple) else (y,)))
    return torch.autograd.grad(total, inputs, create_graph=create_graph)


def dense_linear(layer):
    """torch.nn.Linear's weight and bias, of one of ours."""
    w = layer.matrix("weight")
    return w.to_dense().T, layer.bias


def dense_conv(layer):
    """The weight of torch's convolution, (out, in, *kernel)."""
    kernel, size = layer.kernel_size, layer.block_size
    rows = -(-layer.in_channels // size) * size
    dense = nst.BlockSparse(layer.weight, layer.layout).to_dense()
    dense = dense.reshape(*kernel, rows, -1)[..., : layer.in_channels, : layer.out_channels]
    return dense.permute(-1, -2, *range(len(kernel)))


def dense_lstm(layer):
    """The parameters of torch.nn.LSTM, by name."""
    units, size, parameters = layer.hidden_size, layer.block_size, {}

    def gates_apart(columns):  # (..., blocks * 4 * B) -> (4 * units, ...)
        apart = columns.reshape(*columns.shape[:-1], -1, 4, size).movedim((-2, -3, -1), (0, 1, 2))
        return apart.reshape(4, -1, *columns.shape[:-1])[:, :units].flatten(0, 1)

    for name, parameter in layer.named_parameters():
        if name in layer.handles:
            parameters[name] = gates_apart(layer.matrix(name).to_dense())
        else:
            parameters[name.replace("bias", "bias_ih")] = gates_apart(parameter)
            zeros = torch.zeros(4 * units, dtype=parameter.dtype)
            parameters[name.replace("bias", "bias_hh")] = zeros
    return parameters
