"""Where a Module finds its parameters, and what it refuses to take."""

from collections import OrderedDict, deque

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import nn
from numbsparse.kernels.matmul import RUNGS, rung
from numbsparse.nn import functional as F
from numbsparse.patterns.checks import BLOCK_SIZES


def linear(seed=0):
    return nn.Linear(8, 8, block_size=4, seed=seed)


class Held(nn.Module):
    """Parameters and modules in whatever a user keeps them in."""

    def __init__(self):
        super().__init__()
        self.sizes, self.names, self.nothing = [8, 8], {"a": "b"}, None
        self.blocks = [linear(0), [linear(1)]]
        self.heads = OrderedDict(left=linear(2), right=(linear(3),))
        self.scales = {1: nn.Parameter(np.ones(8, np.float32))}
        self.drops = deque([nn.Dropout(0.5, seed=0), nn.Parameter(np.zeros(8, np.float32))])

    def forward(self, x):
        for layer in (self.blocks[0], self.blocks[1][0], self.heads["left"]):
            x = layer(x)
        x = self.heads["right"][0](x) * self.scales[1] + self.drops[1]
        return self.drops[0](x)


NAMES = [
    "scales.1", "drops.1", "blocks.0.weight", "blocks.0.bias", "blocks.1.0.weight",
    "blocks.1.0.bias", "heads.left.weight", "heads.left.bias", "heads.right.0.weight",
    "heads.right.0.bias",
]  # fmt: skip


def test_parameters_in_lists_tuples_and_dicts(rng, put, place):
    model = Held()
    assert [name for name, _ in model.named_parameters()] == NAMES
    assert model.n_parameters() == 4 * (64 + 8) + 16
    assert [name for name, _ in model.named_children()] == [
        "blocks.0", "blocks.1.0", "heads.left", "heads.right.0", "drops.0",
    ]  # fmt: skip
    assert "heads.right.0: Linear(" in repr(model)
    model.to(place)
    assert {p.place for p in model.parameters()} == {place}
    model(put(rng.standard_normal((2, 8), dtype=np.float32))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert not model.eval().drops[0].training
    state = model.state_dict()
    assert list(state) == [*NAMES, "drops.0.seed", "drops.0.calls"]
    other = Held()
    other.scales[1].data += 1
    other.load_state_dict(state)
    assert (other.scales[1].data == 1).all()


def test_all_of_them_are_trained(rng):
    model = Held()
    before = model.state_dict()
    optimizer = nn.optim.Adam(model.parameters(), lr=0.1)
    F.mse_loss(model(rng.standard_normal((4, 8), dtype=np.float32)), 1.0).backward()
    optimizer.step()
    after = model.state_dict()
    assert all((host(after[name]) != host(before[name])).any() for name in NAMES)


def test_what_is_added_later_is_found():
    model = Held()
    model.blocks.append(linear())
    model.heads["left"] = nn.ReLU()
    names = [name for name, _ in model.named_parameters()]
    assert "blocks.2.weight" in names
    assert "heads.left.weight" not in names


def test_containers_and_modules_that_hold_each_other():
    model = Held()
    model.blocks.append(model.blocks)
    model.heads["left"].parent = [model]
    assert [name for name, _ in model.named_parameters()] == NAMES


@pytest.mark.parametrize("make", [set, frozenset])
def test_a_set_is_refused(make):
    model = nn.ReLU()
    model.layers = {"inner": make([linear()])}
    with pytest.raises(TypeError, match=r"layers\.inner holds .* in a set, .* take a list"):
        model.parameters()
    model.layers = make([nn.Parameter(np.ones(2))])
    with pytest.raises(TypeError, match="layers holds"):
        model.state_dict()
    model.layers = make([1, 2])
    assert model.parameters() == []


def test_equal_names_are_refused():
    model = nn.ReLU()
    model.parts = {1: nn.Parameter(np.ones(2)), "1": nn.Parameter(np.ones(2))}
    with pytest.raises(ValueError, match=r"two parameters .* 'parts\.1'"):
        model.state_dict()


@pytest.mark.parametrize(
    ("name", "data", "error", "says"),
    [
        ("bias", np.zeros(1, np.float32), ValueError, r"the shape \(6,\) here, got \(1,\)"),
        ("bias", np.zeros((6, 1), np.float32), ValueError, r"\(6,\) here, got \(6, 1\)"),
        ("bias", np.zeros(6, int), TypeError, "floating-point .* got int64"),
        ("bias", ns.Tensor(np.zeros(6)), TypeError, "detach"),
        ("bias", np.ma.masked_array(np.zeros(6)), TypeError, "masked"),
        ("weight", np.zeros((5, 6)), TypeError, "a BlockSparse here, got numpy.ndarray"),
        ("weight", nn.init.uniform([[1], [1]], 4), ValueError, r"\(5, 6\) here, got \(8, 4\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_data_are_refused_when_set(name, data, error, says):
    layer = nn.Linear(5, 6, block_size=4, seed=0)
    before, parameter = layer.state_dict(), getattr(layer, name)
    with pytest.raises(error, match=f"^data takes .*{says}"):
        parameter.data = data
    np.testing.assert_array_equal(host(layer.state_dict()[name]), host(before[name]))


def test_another_pattern_and_another_dtype_are_taken():
    layer = nn.Linear(5, 6, block_size=4, seed=0)
    layer.weight.data = nn.init.uniform(np.eye(2), 4, shape=(5, 6), dtype=np.float64)
    layer.bias.data = [1.0] * 6
    assert layer(np.ones((1, 5))).dtype == np.float64


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(5, 6, block_size=4), nn.Conv1d(5, 6, 1, block_size=4), nn.LayerNorm(5),
     nn.ConvTranspose1d(5, 6, 1, block_size=4)],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(1,), (3, 1, 1), (3, 4, 5)], ids=str)
def test_a_bias_of_another_shape_does_not_broadcast(layer, shape):
    layer.bias = nn.Parameter(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=r"bias takes the shape \([56],\) here, got"):
        layer(ns.Tensor(np.ones((3, 4, 5), np.float32)))


@pytest.mark.parametrize("size", [1, 2, 12, 48, 256])
@pytest.mark.parametrize(
    "make",
    [
        lambda **how: nn.Linear(96, 96, **how),
        lambda **how: nn.Conv2d(96, 96, 3, **how),
        lambda **how: nn.ConvTranspose1d(96, 96, 3, **how),
        lambda **how: nn.LSTM(96, 96, **how),
        lambda **how: nn.MultiplicativeLSTM(96, 96, **how),
        lambda block_size: nn.NormalizedProduct(nn.init.uniform([[1]], block_size)),
    ],
    ids=["Linear", "Conv2d", "ConvTranspose1d", "LSTM", "MultiplicativeLSTM", "NormalizedProduct"],
)
def test_a_block_size_without_kernels_is_refused_at_once(make, size):
    with pytest.raises(ValueError, match=rf"block_size takes one of \(4, 8, .*\), got {size}"):
        make(block_size=size)


def test_block_sizes_are_those_of_the_kernels():
    for place in ("cpu", "cuda"):
        names = [name for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
        for size in range(1, 300):
            serves = any(
                rung(name).unsupported("forward", size, "float32", place) is None for name in names
            )
            assert serves == (size in BLOCK_SIZES)
