"""Where a Module finds its parameters, and all that walks over them."""

from collections import OrderedDict, UserList, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import host
from drawn import draws
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import nn
from numbsparse.nn import functional as F


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


@dataclass
class Parts:
    first: Any
    second: Any


@dataclass(slots=True)
class SlottedParts:
    first: Any
    second: Any


def objects(*values):
    array = np.empty((1, len(values)), object)
    for i, value in enumerate(values):
        array[0, i] = value
    return array


def beside(holder, module):
    holder.head = module
    return holder


HOLDERS = {  # of two things, and their names
    "lists": (lambda a, b: [[a], (b,)], ["0.0", "1.0"]),
    "UserList": (lambda a, b: UserList([a, b]), ["0", "1"]),
    "values": (lambda a, b: {"a": a, "b": b}.values(), ["0", "1"]),
    "items": (lambda a, b: {"a": a, "b": b}.items(), ["0.1", "1.1"]),
    "array": (objects, ["0", "1"]),
    "dataclass": (Parts, ["first", "second"]),
    "dataclass with slots": (SlottedParts, ["first", "second"]),
    "namespace": (lambda a, b: SimpleNamespace(a=a, b={"c": b}), ["a", "b.c"]),
}
OF_MODULES = {
    "ModuleList": (lambda a, b: nn.ModuleList([a, b]), ["0", "1"]),
    "ModuleDict": (lambda a, b: nn.ModuleDict({"a": a, "b": b}), ["a", "b"]),
    "Sequential": (lambda a, b: nn.Sequential({"a": a, "b": b}), ["a", "b"]),
    "beside a list": (lambda a, b: beside(nn.ModuleList([a]), b), ["0", "head"]),
    "beside a dict": (lambda a, b: beside(nn.ModuleDict({"a": a}), b), ["a", "head"]),
    "both": (lambda a, b: [nn.ModuleDict({"a": nn.ModuleList([a])}), {"c": b}], ["0.a.0", "1.c"]),
}


@pytest.mark.parametrize("name", [*HOLDERS, *OF_MODULES])
def test_whatever_holds_them_they_are_trained(rng, name):
    hold, names = {**HOLDERS, **OF_MODULES}[name]
    layers = [nn.Linear(8, 8, block_size=4, bias=False, seed=i) for i in range(2)]
    scales = [nn.Parameter(rng.standard_normal(8, dtype=np.float32)) for _ in range(2)]
    model = nn.ReLU()
    model.layers = hold(*layers)
    model.scales = hold(*scales) if name in HOLDERS else scales
    found = [name for name, _ in model.named_parameters()]
    ends = names if name in HOLDERS else ["0", "1"]
    assert found == [*(f"scales.{n}" for n in ends), *(f"layers.{n}.weight" for n in names)]
    optimizer, before = nn.optim.SGD(model.parameters(), lr=0.1), model.state_dict()
    y = rng.standard_normal((2, 8), dtype=np.float32)
    for layer, scale in zip(layers, scales, strict=True):
        y = F.tanh(layer(y)) * scale
    (y * y).sum().backward()
    optimizer.step()
    after = model.state_dict()
    assert all((host(after[name]) != host(before[name])).any() for name in found)


def test_modules_of_a_class_are_found():
    class Shared(nn.Module):
        head = linear()
        scale = nn.Parameter(np.ones(2))

    class Mine(Shared):
        heads = (linear(1),)

    model = Mine()
    names = ["scale", "head.weight", "head.bias", "heads.0.weight", "heads.0.bias"]
    assert [name for name, _ in model.named_parameters()] == names
    model.head = nn.ReLU()  # its own hides that of the class
    assert [name for name, _ in model.named_parameters()] == ["scale", *names[3:]]
    assert len(Shared().parameters()) == 3
    with pytest.raises(TypeError, match="Slotted takes no __slots__"):

        class Slotted(nn.Module):
            __slots__ = ("head",)


def test_init_of_the_base_may_be_left_out():
    @dataclass(eq=False)
    class Model(nn.Module):
        head: nn.Linear

        def forward(self, x, *, scale=1.0):
            return self.head(x) * scale

    model = Model(linear())
    x = np.ones((2, 8), np.float32)
    np.testing.assert_array_equal(model(x, scale=2.0).numpy(), 2 * model(x=x).numpy())
    assert model.training
    assert not model.eval().head.training
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        model(x, mask=None)


def test_a_walk_over_modules():
    """Each once, by torch's names; `apply` goes from the inside out."""
    shared, inner = nn.Tanh(), nn.Sequential(nn.ReLU(), nn.GELU())
    model = nn.Sequential({"a": shared, "b": inner})
    model.append(shared)
    everything = [model, shared, inner, *inner]
    assert [name for name, _ in model.named_modules()] == ["", "a", "b", "b.0", "b.1"]
    assert [name for name, _ in model.named_modules("net")][:2] == ["net", "net.a"]
    assert list(model.modules()) == everything
    assert list(model.children()) == [shared, inner, shared]
    seen = []
    assert model.apply(seen.append) is model
    assert seen == [shared, *inner, inner, model]
    inner.parent = model
    assert list(model.modules()) == everything


def test_all_are_frozen_and_thawed():
    model = nn.Sequential(linear(), linear())
    assert model.requires_grad_(False) is model
    assert model.n_parameters() == 0
    assert not model(np.ones((2, 8), np.float32)).requires_grad
    assert model.requires_grad_().n_parameters() == 2 * 72
    for some in (model, nn.Sequential(), nn.Dropout(0.5)):
        with pytest.raises(TypeError, match="requires_grad takes True or False, got 'no'"):
            some.requires_grad_("no")


def test_a_sequential_is_cut_and_changed():
    first, second, third = linear(0), nn.ReLU(), linear(1)
    model = nn.Sequential(first, second)
    assert model.append(third) is model
    assert (len(model), model[-1], list(model[:2])) == (3, third, [first, second])
    tail = model[1:].append(first)
    assert type(tail) is nn.Sequential
    assert list(tail.named_children()) == [("1", second), ("2", third), ("3", first)]
    model[-1] = nn.Linear(8, 4, block_size=4, seed=0)
    assert model(np.ones((2, 8), np.float32)).shape == (2, 4)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert nn.Sequential({"head": first}).head is first
    with pytest.raises(ValueError, match="names that are not taken, got 'training'"):
        nn.Sequential({"training": first})
    with pytest.raises(TypeError, match="strings as names, got 0"):
        nn.Sequential({0: first})
    for wrong in (lambda: nn.Sequential(first, 1), lambda: model.append([first]),
                  lambda: model.__setitem__(0, None)):  # fmt: skip
        with pytest.raises(TypeError, match="modules takes Modules"):
            wrong()


def test_lists_and_dicts_of_modules_are_lists_and_dicts():
    layers, (a, b, c) = nn.ModuleList(), (linear(i) for i in range(3))
    layers.append(a)
    layers += [b]
    layers.insert(0, c)
    assert (list(layers), layers[-1], layers.index(a)) == ([c, a, b], b, 1)
    assert (b in layers, linear(1) in layers, len({layers, nn.ModuleList([c, a, b])})) == (1, 0, 2)
    layers[1:] = [b]
    assert type(layers[:1]) is nn.ModuleList
    assert (layers.pop(), list(layers)) == (b, [c])
    heads = nn.ModuleDict([("a", a)])
    heads.update(b=b)
    assert (list(heads.items()), heads.pop("a"), len(heads)) == ([("a", a), ("b", b)], a, 1)
    assert hash(heads) is not None
    for wrong in (lambda: nn.ModuleList([1]), lambda: layers.append(None), lambda:
                  layers.__setitem__(slice(0, 1), [1]), lambda: heads.update(x=1)):  # fmt: skip
        with pytest.raises(TypeError, match="modules takes Modules, got"):
            wrong()
    with pytest.raises(TypeError, match="strings as names, got 0"):
        heads[0] = a
    assert list(heads) == ["b"]


class Counting(nn.Module):
    """Buffers of several kinds, as users of torch write them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", np.zeros(2, np.float32))
        self.register_buffer("count", np.zeros((), np.int64))
        self.register_buffer("mask", np.array([True, False]), persistent=False)
        self.register_buffer("later", None)
        self.weight = nn.Parameter(np.ones(2, np.float32))


def test_buffers_are_saved_and_moved_and_not_trained(place, tmp_path):
    model = nn.Sequential(Counting(), nn.ReLU())
    model.again = model[0]
    names = ["0.mean", "0.count", "0.mask"]
    assert [name for name, _ in model.named_buffers()] == names
    assert len(model.parameters()) == 1
    model.to(place)
    assert {buffer.place for buffer in model.buffers()} == {place}
    own = model[0]
    own.mean = own.mean * 0.5 + 1.0
    own.count = np.array(3)
    own.later = np.float32([7])
    state = model.state_dict()
    assert list(state) == ["0.weight", "0.mean", "0.count", "0.later"]
    assert (state["0.mean"].tolist(), int(state["0.count"])) == ([1, 1], 3)
    nn.save(tmp_path / "state", {"model": state})
    other = nn.Sequential(Counting(), nn.ReLU())
    other.again = other[0]
    other[0].later = np.zeros(1, np.float32)
    other.to(place).load_state_dict(nn.load(tmp_path / "state")["model"])
    assert {buffer.place for buffer in other.buffers()} == {place}
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, state[name], strict=True)
    with pytest.raises(ValueError, match=r"'0\.count'\] takes \(\) of int64, got \(\) of float64"):
        other.load_state_dict(state | {"0.count": 2.5})
    with pytest.raises(ValueError, match=r"'0\.mean'\] takes \(2,\) of float32"):
        other.load_state_dict(state | {"0.mean": np.zeros(2)})
    with pytest.raises(ValueError, match=r"lacks \['0\.mean'\]"):
        other.load_state_dict({name: state[name] for name in state if name != "0.mean"})


# Every layer of arrays; what it takes but for the features, which are 8.
LAYERS = {
    "Linear": (2,), "LayerNorm": (2,), "BatchNorm": (2,), "Dropout": (2,), "ReLU": (2,),
    "GELU": (2,), "Sigmoid": (2,), "Tanh": (2,), "NormalizedProduct": (2,), "Conv1d": (2, 4),
    "Conv2d": (2, 3, 4), "ConvTranspose1d": (2, 4), "LSTM": (3, 2), "MultiplicativeLSTM": (3, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_arrays_as_it_takes_tensors(name, rng):
    made, sizes = getattr(nn, name), {"block_size": 4, "seed": 0}
    if name == "NormalizedProduct":
        layer = made(nn.init.uniform(np.ones((2, 2)), 4, seed=0))
    elif name.startswith("Conv"):
        layer = made(8, 8, 2, **sizes)
    elif name in ("LayerNorm", "BatchNorm"):
        layer = made(8)
    else:
        layer = made(8, 8, **sizes) if "L" in name and name not in ("ReLU", "GELU") else made()
    x = rng.standard_normal((*LAYERS[name], 8)).astype(np.float32)
    layer.eval()
    found, right = layer(x), layer(ns.Tensor(x))
    if isinstance(right, tuple):
        found, right = found[0], right[0]
    np.testing.assert_array_equal(found.numpy(), right.numpy())


@draws(10, "arrays assigned to buffers")
@given(st.integers(0, 2**20), st.booleans(), st.sampled_from(["float32", "float64"]))
def test_an_array_that_is_assigned_to_a_buffer_is_one(seed, training, dtype):
    """Used at once, before anything lists the buffers."""
    rng = np.random.default_rng(seed)
    features = int(rng.integers(1, 6))
    assigned, loaded = (nn.BatchNorm(features, dtype=dtype).train(training) for _ in range(2))
    values = {name: rng.random(features).astype(dtype) for name in loaded.state_dict()}
    loaded.load_state_dict(values)
    for name in ("running_mean", "running_variance"):
        setattr(assigned, name, values[name].copy())
    for name in ("weight", "bias"):
        getattr(assigned, name).data = values[name].copy()
    x = rng.standard_normal((4, features)).astype(dtype)
    np.testing.assert_array_equal(assigned(x).numpy(), loaded(x).numpy())
    assert isinstance(assigned.running_mean, ns.Tensor)
    for name, value in loaded.state_dict().items():
        np.testing.assert_array_equal(assigned.state_dict()[name], value)
    with pytest.raises(TypeError, match="running_mean takes"):
        assigned.running_mean = "none"


@pytest.mark.parametrize("name", ["weight", "forward", "training", "", "a.b", 1])
def test_a_buffer_wants_a_name_of_its_own(name):
    with pytest.raises((TypeError, ValueError), match=f"name takes .* got {name!r}"):
        Counting().register_buffer(name, np.zeros(2))
    model = Counting()
    model.register_buffer("mean", np.ones(3))  # again
    assert model.mean.shape == (3,)
    model.mean = nn.Parameter(np.zeros(3))  # a Parameter from now on
    assert [name for name, _ in model.named_buffers()] == ["count", "mask"]
    assert list(model.state_dict()) == ["mean", "weight", "count"]
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("order", ["Fortran", "every other row"])
def test_arrays_in_any_order_are_trained(order, put):
    a = put(np.arange(12, dtype=np.float32).reshape(4, 3))
    a, right = (a.T, host(a).T) if order == "Fortran" else (a[::2], host(a)[::2])
    assigned = nn.Parameter(put(np.zeros(right.shape, np.float32)))
    assigned.data = a
    for p in (nn.Parameter(a), assigned):
        (p * p).sum().backward()
        nn.optim.SGD([p], lr=0.5).step()  # which took it for C-contiguous, and refused it
        np.testing.assert_array_equal(host(p.data), 0 * right)
    np.testing.assert_array_equal(host(a), right)  # a copy was trained
