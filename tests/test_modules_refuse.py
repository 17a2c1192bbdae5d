"""What Modules, Parameters and layers refuse to take."""

import contextlib
import operator

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.kernels.matmul import RUNGS, rung
from numbsparse.patterns.checks import BLOCK_SIZES


def linear(seed=0):
    return nn.Linear(8, 8, block_size=4, seed=seed)


@pytest.mark.parametrize("make", [set, frozenset])
def test_a_set_is_refused(make):
    model = nn.ReLU()
    model.layers = {"inner": make([linear()])}
    with pytest.raises(TypeError, match=r"layers\.inner holds .* in a set, .* use a list"):
        model.parameters()
    model.layers = make([nn.Parameter(np.ones(2))])
    with pytest.raises(TypeError, match="layers holds"):
        model.state_dict()
    model.layers = make([1, 2])
    assert model.parameters() == []


def test_equal_names_of_what_is_saved_are_refused():
    dropout = nn.Dropout(seed=1)
    model = nn.ModuleDict({"a.b": dropout, "a": nn.ModuleDict({"b": nn.Dropout(seed=2)})})
    state = {"a.b.seed": 3, "a.b.calls": 0}
    for refused in (model.state_dict, lambda: model.load_state_dict(state)):
        with pytest.raises(ValueError, match=r"this module saves are named 'a\.b\.seed'"):
            refused()
    assert dropout.seed == 1


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


@pytest.mark.parametrize(
    "value", [1.0, np.zeros(8, np.float32), "weight", ns.Tensor(np.zeros(8, np.float32))], ids=str
)
def test_values_in_the_place_of_a_parameter_are_refused(value):
    layer = nn.Linear(8, 8, block_size=4)
    before = layer.parameters()
    for name, other in (("bias", value), ("weight", layer.weight.data)):
        with pytest.raises(TypeError, match=rf"{name} takes a Parameter.*\.{name}\.data = "):
            setattr(layer, name, other)
    assert all(one is other for one, other in zip(layer.parameters(), before, strict=True))
    layer.bias = None
    assert layer.parameters() == before[:1]


def test_values_in_the_place_of_a_parameter_of_the_class_are_refused():
    class Scale(nn.Module):
        factor = nn.Parameter(np.ones(1))

    layer = Scale()
    with pytest.raises(TypeError, match="factor takes a Parameter, got"):
        layer.factor = np.zeros(1)
    layer.factor = own = nn.Parameter(np.zeros(1))
    assert layer.parameters() == [own]


@pytest.mark.parametrize("records", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("sign", ["iadd", "isub", "imul", "itruediv", "ipow", "imatmul"])
def test_a_parameter_is_not_replaced_by_the_way(sign, records):
    """In `for p in parameters: p -= rate * p.grad` nothing would be trained."""
    layer = linear()
    before = layer.parameters()
    with contextlib.nullcontext() if records else ns.no_grad():
        for p in before:
            with pytest.raises(TypeError, match=r"p\.data = \(p - x\)\.data changes"):
                getattr(operator, sign)(p, 2.0)
        layer.bias.data = (layer.bias - layer.bias).data
    assert all(one is other for one, other in zip(layer.parameters(), before, strict=True))
    assert not layer.bias.data.any()


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


@pytest.mark.simulator
def test_block_sizes_are_those_of_the_kernels():
    for place in ("cpu", "cuda"):
        names = [name for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
        for size in range(1, 300):
            serves = any(
                rung(name).unsupported("forward", size, "float32", place) is None for name in names
            )
            assert serves == (size in BLOCK_SIZES)


@pytest.mark.simulator
def test_layers_on_a_gpu_refuse_what_is_not_there():
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    for layer, shape in (
        (nn.Linear(8, 8, block_size=8), (2, 8)),
        (nn.Conv2d(8, 8, 1, block_size=8), (1, 2, 2, 8)),
        (nn.LSTM(8, 8, block_size=8), (2, 1, 8)),
    ):
        layer.to("cuda")
        with pytest.raises(ValueError, match="x takes the device of the weights, cuda:0, got cpu"):
            layer(np.ones(shape, np.float32))


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))], ids=repr)
def test_a_module_in_place_of_its_parameters_is_refused_with_what_to_pass(model):
    for call in (nn.optim.AdamW, nn.optim.ExponentialMovingAverage):
        with pytest.raises(TypeError, match=r"parameters takes a list.*pass its \.parameters\(\)"):
            call(model)
