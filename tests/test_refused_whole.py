"""What is refused changes nothing: steps of optimizers, and states that are loaded."""

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.nn import optim

MAKERS = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, 0.1),
    "AdamW": lambda p: optim.AdamW(p, 0.1),
}
PATTERN = np.eye(2)
LAST = 1  # of the two parameters, the one with the bad gradient


def two(put, dtype=np.float32):
    sparse = ns.BlockSparse(np.ones((2, 4, 4), dtype), PATTERN)
    return [nn.Parameter(put(sparse)), nn.Parameter(put(np.ones(3, dtype)))]


def to_gpu(a):
    return a.to("cuda") if isinstance(a, ns.BlockSparse) else ns.to_device(a)


def give_gradients(parameters):
    for p in parameters:
        p.grad = ns.Tensor(ns.ops.copy(p.data) if p.ndim == 1 else p.data.copy())


def state_of(parts):
    """All that may change, copied to the host."""
    states = [part.state_dict() for part in parts if hasattr(part, "state_dict")]
    states += [{"data": part.data} for part in parts if isinstance(part, ns.Tensor)]
    return [{k: np.array(host(v)) for k, v in state.items()} for state in states]


def assert_unchanged(parts, before):
    for got, expected in zip(state_of(parts), before, strict=True):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(got[key], value, err_msg=key)


BAD = {
    "shape": (lambda put: put(np.ones(4, np.float32)), "another layout than its parameter"),
    "dtype": (lambda put: put(np.ones(3, np.float16)), r"parameters\[1\]: .*float16"),
    "place": (lambda put: "other", "takes the device of its parameter"),
    "sparse": (
        lambda put: put(ns.BlockSparse(np.ones((1, 4, 4), np.float32), [[1]], shape=(3, 3))),
        "another layout than its parameter",
    ),
}


@pytest.mark.pairs
@pytest.mark.parametrize("scaled", [False, True], ids=["step", "scaled step"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
def test_a_bad_second_gradient_changes_nothing(place, put, name, bad, scaled, begun):
    parameters = two(put)
    optimizer, scaler = MAKERS[name](parameters), optim.LossScaler(8.0, interval=1)
    if begun:
        give_gradients(parameters)
        scaler.step(optimizer) if scaled else optimizer.step()
    give_gradients(parameters)
    make, says = BAD[bad]
    gradient = make(put)
    if isinstance(gradient, str):
        if not device.is_available():
            pytest.skip(device.why_unavailable())
        gradient = np.ones(3, np.float32)
        gradient = gradient if place == "cuda" else ns.to_device(gradient)
    parameters[LAST].grad = ns.Tensor(gradient)
    parts = [optimizer, scaler, *parameters]
    before = state_of(parts)
    with pytest.raises((TypeError, ValueError), match=says):
        scaler.step(optimizer) if scaled else optimizer.step()
    assert_unchanged(parts, before)
    give_gradients(parameters)
    optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_a_read_only_second_parameter_changes_nothing(name):
    parameters = two(lambda a: a)
    parameters[LAST].data.flags.writeable = False
    optimizer = MAKERS[name](parameters)
    give_gradients(parameters)
    before = state_of([optimizer, *parameters])
    with pytest.raises(ValueError, match=r"parameters\[1\]: p is written in place.*read-only"):
        optimizer.step()
    assert_unchanged([optimizer, *parameters], before)


@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_state_of_another_dtype_is_refused(name):
    parameters = two(lambda a: a)
    optimizer = MAKERS[name](parameters)
    give_gradients(parameters)
    optimizer.step()
    parameters[LAST].data = np.ones(3)
    give_gradients(parameters)
    before = state_of([optimizer, *parameters])
    with pytest.raises(ValueError, match=r"parameters\[1\] is float64 now, .* 'float32'"):
        optimizer.step()
    assert_unchanged([optimizer, *parameters], before)


WRONG = {
    "steps": [None, "3", -1, 1.5, float("nan"), True, np.ones(2)],
    "skipped": [None, "0", -1, 0.5, 99],
    "lr": [None, "0.1", -0.1, float("nan"), True, np.ones(1)],
    "0.steps": [None, "3", -1, 0.5],
    "1.m": [None, 1.0, np.ones(4, np.float32), np.ones(3)],
    "0.v": [None, np.ones(3, np.float32)],
    "2.m": [np.ones(3, np.float32)],
    "\u00b2.m": [np.ones(3, np.float32)],
    "other": [1],
}


@pytest.mark.parametrize(
    ("key", "number"), [(key, n) for key, values in WRONG.items() for n in range(len(values))]
)
def test_a_bad_optimizer_state_changes_nothing(put, key, number):
    other, parameters = two(put), two(put)
    loaded, optimizer = MAKERS["Adam"](other), MAKERS["Adam"](parameters)
    for ps, o in ((other, loaded), (parameters, optimizer), (parameters, optimizer)):
        give_gradients(ps)
        o.step()
    state, wrong = loaded.state_dict(), WRONG[key][number]
    (state if key != "lr" else state["param_groups"][0])[key] = wrong
    before = state_of([optimizer, *parameters])
    with pytest.raises((TypeError, ValueError), match="state"):
        optimizer.load_state_dict(state)
    assert_unchanged([optimizer, *parameters], before)


@pytest.mark.parametrize("missing", ["steps", "param_groups", "0.steps", "1.v"])
def test_a_state_that_lacks_something_changes_nothing(put, missing):
    parameters = two(put)
    optimizer = MAKERS["Adam"](parameters)
    give_gradients(parameters)
    optimizer.step()
    state, before = optimizer.state_dict(), state_of([optimizer])
    del state[missing]
    with pytest.raises(ValueError, match=f"state lacks '{missing}'"):
        optimizer.load_state_dict(state)
    assert_unchanged([optimizer], before)


OTHERS = np.ones(3), np.ones((3, 2), np.float32)[:, 0], np.ones(3, np.float16)


@pytest.mark.parametrize(
    ("other", "begun"),
    [
        *((other, True) for other in OTHERS),
        *((other, False) for other in (*OTHERS[1:], np.arange(3))),
    ],
    ids=["dtype", "order", "half", "order, first", "half, first", "integers, first"],
)
def test_an_average_of_a_bad_second_parameter_changes_nothing(other, begun):
    parameters = two(lambda a: a)
    parameters[LAST] = ns.Tensor(np.ones(3, np.float32))  # a Parameter takes any order
    average = optim.ExponentialMovingAverage(parameters, 0.5)
    if begun:
        average.step()
    parameters[0].data.values *= 2
    parameters[LAST].data = other
    before = average.state_dict()
    wrong = r"parameters\[1\].* " + ("takes|has another layout" if begun else "takes")
    with pytest.raises((TypeError, ValueError), match=wrong):
        average.step()
    after = average.state_dict()
    assert list(after) == list(before)
    assert after["steps"] == before["steps"] == begun
    if begun:
        np.testing.assert_array_equal(after["0"].data, before["0"].data)
    else:  # an average of nothing is not given to the parameters
        with pytest.raises(RuntimeError, match="no average before"), average.applied():
            pass


def test_an_average_is_of_parameters_in_one_place():
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    average = optim.ExponentialMovingAverage([*two(lambda a: a), *two(to_gpu)])
    with pytest.raises(
        ValueError, match=r"parameters takes Tensors of one device, got \['cpu', 'cu"
    ):
        average.step()
    assert average.state_dict() == {"steps": 0}


@pytest.mark.parametrize("state", [{}, None, 3, {"steps": "1", "0": np.ones(3)}], ids=repr)
def test_a_bad_average_state_changes_nothing(state):
    average = optim.ExponentialMovingAverage([nn.Parameter(np.ones(3))])
    average.step()
    before = state_of([average])
    with pytest.raises((TypeError, ValueError), match="state"):
        average.load_state_dict(state)
    assert_unchanged([average], before)


def trained():
    """All that has a state, after a step: a rewiring with candidates among it."""
    layer = nn.Linear(8, 8, layout=PATTERN, block_size=4, seed=0)
    model = nn.Sequential(layer, nn.Dropout(0.5, seed=3))
    optimizer = optim.Adam(model.parameters())
    average = optim.ExponentialMovingAverage(model.parameters())
    rewiring = nn.utils.Rewiring(model, every=2, remap=[optimizer, average], seed=0)
    parts = model, optimizer, average, rewiring, optim.LossScaler()
    nn.functional.sum(model(np.ones((2, 8), np.float32))).backward()
    rewiring.step()
    optimizer.step()
    average.step()
    return (*parts, optim.LambdaLR(optimizer, lambda step: 1.0))


def bad_ones(value):
    yield from (None, "a", {"a": 1}, [], 3 if isinstance(value, dict) else np.float64("nan"))
    array = value.values if isinstance(value, ns.BlockSparse) else value
    if isinstance(array, np.ndarray):
        yield np.ma.masked_array(array, False)


@pytest.mark.parametrize("part", range(6))
def test_whatever_is_bad_in_a_state_is_named_and_changes_nothing(part):
    parts = trained()
    one, before = parts[part], [part.state_dict() for part in parts]
    for bad in (None, 3, "abc", []):
        with pytest.raises((TypeError, ValueError), match=r"^state takes"):
            one.load_state_dict(bad)
    for key, value in before[part].items():
        for bad in bad_ones(value):
            with pytest.raises((TypeError, ValueError), match=rf"state\['{key}'\]"):
                one.load_state_dict(before[part] | {key: bad})
            for other, state in zip(parts, before, strict=True):
                assert_same(other.state_dict(), state)


def assert_same(got, expected):
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, ns.BlockSparse):
        assert got.layout == expected.layout
        np.testing.assert_array_equal(got.values, expected.values)
    else:
        np.testing.assert_array_equal(got, expected)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 4, block_size=4, seed=0)
        self.dropout = nn.Dropout(0.5, seed=3)


@pytest.mark.parametrize("key", ["seed", "calls"])
@pytest.mark.parametrize("bad", [None, "1", -1, 1.5, 2**64, True], ids=repr)
def test_a_bad_number_of_dropout_changes_nothing(key, bad):
    model = Model()
    before = state_of([model])
    state = model.state_dict() | {f"dropout.{key}": bad}
    state["hidden.weight"] = state["hidden.weight"].with_values(np.ones((1, 4, 4), np.float32))
    with pytest.raises(
        (TypeError, ValueError), match=rf"state\['dropout.{key}'\] takes an integer"
    ):
        model.load_state_dict(state)
    assert_unchanged([model], before)


def test_saved_numbers_keep_their_kind():
    class Gate(nn.Module):
        saved = ("share", "count", "name", "open")

        def __init__(self):
            super().__init__()
            self.share, self.count, self.name, self.open = 0.5, -3, "gate", True

    gate, state = Gate(), Gate().state_dict()
    gate.load_state_dict(state | {"share": 1, "count": np.int64(-4), "open": False})
    assert (gate.share, gate.count, gate.open) == (1, -4, False)
    for key, bad in (("share", "1"), ("count", 1.0), ("name", 3), ("open", 1), ("count", True)):
        with pytest.raises(TypeError, match=rf"state\['{key}'\] takes a "):
            gate.load_state_dict(state | {key: bad})
    assert (gate.share, gate.count) == (1, -4)
