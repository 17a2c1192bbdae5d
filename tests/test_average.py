"""The moving average of weights: its formula, its loan to the parameters, and its state."""

import numpy as np
import pytest
from conftest import HALVES, host

import numbsparse as ns
from numbsparse import nn, ops
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.nn import optim

LAYOUT = ns.Layout([[1, 0], [1, 1]])


def averaged(history, decay):
    """The average after these values, in float64."""
    average = np.zeros_like(history[0], float)
    for t, value in enumerate(history):
        d = min(decay, t / (t + 9))
        average = d * average + (1 - d) * value.astype(float)
    return average


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9995])
def test_average_follows_its_formula(rng, put, place, dtype, decay):
    if (place == "cpu" and dtype in HALVES) or (place == "cuda" and dtype == "float64"):
        pytest.skip(f"{dtype} is not trained in there")
    dtype = as_dtype(dtype)
    dense = nn.Parameter(put(np.full((3, 5), np.nan).astype(dtype)))
    sparse = nn.Parameter(put(ns.BlockSparse(np.full((3, 4, 4), np.nan).astype(dtype), LAYOUT)))
    average = optim.ExponentialMovingAverage([dense, sparse], decay)
    history = []
    for _ in range(12):
        values = [rng.standard_normal(p.values.shape).astype(dtype) for p in (dense, sparse)]
        for parameter, array in zip((dense, sparse), values, strict=True):
            ops.copy_into(parameter.values, put(array))
        average.step()
        history.append(values)
    eps = 2.0**-52 if dtype == "float64" else 2.0**-23
    for i, parameter in enumerate((dense, sparse)):
        expected = averaged([values[i] for values in history], decay)
        saved = average.state_dict()[str(i)]
        saved = saved.data if isinstance(saved, ns.BlockSparse) else saved
        np.testing.assert_allclose(saved, expected, rtol=0, atol=64 * eps)
        with average.applied():
            shown = host(parameter.values).astype(float)
        bound = 64 * eps + float(finfo(dtype).eps) * np.abs(expected)
        assert (abs(shown - expected) <= bound).all()
        np.testing.assert_array_equal(host(parameter.values), history[-1][i])


def test_parameters_are_given_back_after_an_error(rng):
    parameter = nn.Parameter(np.ones(3))
    average = optim.ExponentialMovingAverage([parameter])
    average.step()
    parameter.data[:] = 2
    with pytest.raises(IndexError), average.applied():
        assert parameter.data[3 * int(parameter.data[0])]
    assert (parameter.data == 2).all()


@pytest.mark.parametrize("after", range(3))
def test_parameters_are_given_back_however_often_that_is_interrupted(after, monkeypatch):
    parameters = [nn.Parameter(np.full(3, float(i))) for i in range(3)]
    average = optim.ExponentialMovingAverage(parameters)
    average.step()
    for p in parameters:
        p.data += 5
    copies, copy_into = [], ops.copy_into

    def interrupted(to, values):
        copies.append(to)
        if len(copies) == 4 + after:  # three averages before
            raise KeyboardInterrupt
        copy_into(to, values)

    monkeypatch.setattr(ops, "copy_into", interrupted)
    with pytest.raises(KeyboardInterrupt), average.applied():
        pass
    assert [p.data[0] for p in parameters] == [5, 6, 7]


def test_what_changes_a_layout_meanwhile_is_undone(put, rng):
    w = ns.BlockSparse(rng.standard_normal((4, 4, 4), dtype=np.float32), np.ones((2, 2)))
    parameters = [nn.Parameter(put(w)), nn.Parameter(put(w.T.copy()))]
    average = optim.ExponentialMovingAverage(parameters)
    average.step()
    with average.applied():
        for layout in ([[0, 1], [1, 1]], [[1, 0], [0, 1]]):
            parameters[0].data = parameters[0].data.remap(layout)
    for p, right in zip(parameters, (w, w.T), strict=True):
        np.testing.assert_array_equal(p.data.toarray(), right.toarray())


def test_an_average_is_not_taken_over_blocks_elsewhere(put):
    """As many as before, so that their arrays would fit."""
    parameter = nn.Parameter(put(ns.BlockSparse(np.ones((2, 4, 4), np.float32), np.eye(2))))
    average = optim.ExponentialMovingAverage([parameter])
    average.step()
    parameter.data = parameter.data.remap([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"parameters\[0\] has another layout than its average"):
        average.step()
    assert average.steps == 1
    average.remap()
    average.step()


def test_the_average_of_new_blocks_begins_with_the_parameter(put):
    parameter = nn.Parameter(put(ns.BlockSparse(np.ones((1, 4, 4), np.float32), [[1, 0]])))
    average = optim.ExponentialMovingAverage([parameter])
    average.step()
    wider = np.stack([np.full((4, 4), n, np.float32) for n in (5, 7)])
    parameter.data = put(ns.BlockSparse(wider, [[1, 1]]))
    average.remap()
    assert average.state_dict()["0"].data[:, 0, 0].tolist() == [1, 7]


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_average_resumes_from_a_file(rng, put, shape, tmp_path):
    values = [np.array(rng.standard_normal(shape), np.float32) for _ in range(6)]
    parameter = nn.Parameter(put(values[0]))
    whole, first = (optim.ExponentialMovingAverage([parameter], 0.5) for _ in range(2))
    for value in values[:3]:
        ops.copy_into(parameter.data, put(value))
        whole.step()
        first.step()
    second = optim.ExponentialMovingAverage([parameter], 0.5)
    ns.save(tmp_path / "average.npz", first.state_dict())
    second.load_state_dict(ns.load(tmp_path / "average.npz"))
    for value in values[3:]:
        ops.copy_into(parameter.data, put(value))
        whole.step()
        second.step()
    assert second.steps == 6
    np.testing.assert_array_equal(whole.state_dict()["0"], second.state_dict()["0"])


def test_an_average_of_many_parameters_resumes():
    """Whose numbers as texts have another order."""
    parameters = [nn.Parameter(np.full(2, i, np.float32)) for i in range(12)]
    first, second = (optim.ExponentialMovingAverage(parameters, 0.5) for _ in range(2))
    first.step()
    second.load_state_dict(first.state_dict())
    for i in range(12):
        np.testing.assert_array_equal(second.state_dict()[str(i)], np.full(2, i))


@pytest.mark.simulator
def test_average_within_a_graph_counts_each_replay():
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    parameters = [nn.Parameter(ns.to_device(np.zeros(5, np.float32))) for _ in range(2)]
    averages = [optim.ExponentialMovingAverage([p], 0.5) for p in parameters]

    def step(x):
        for p, average in zip(parameters, averages, strict=True):
            ops.copy_into(p.data, x if isinstance(x, ns.DeviceArray) else x.data)
            average.step()

    captured = ns.graph(step)
    for i in range(5):
        captured(np.full(5, i, np.float32))
    assert averages[0].steps == 5
    expected = averaged([np.full(5, i) for i in range(5)], 0.5)
    np.testing.assert_allclose(averages[0].state_dict()["0"], expected, rtol=1e-6)


@pytest.mark.simulator
def test_averages_follow_their_parameters_to_another_place(rng):
    """As what optimizers keep does."""
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    layer, stayed = (nn.Linear(8, 6, layout=LAYOUT, block_size=4, seed=0) for _ in range(2))
    ours, theirs = (optim.ExponentialMovingAverage(m.parameters(), 0.5) for m in (layer, stayed))
    for place in ("cpu", "cuda", "cuda", "cpu"):
        layer.to(place)
        for mine, other in zip(layer.parameters(), stayed.parameters(), strict=True):
            values = rng.standard_normal(other.values.shape, dtype=np.float32)
            ops.copy_into(other.values, values)
            ops.copy_into(mine.values, ns.to_device(values) if place == "cuda" else values)
        before = layer.bias.data
        if place == "cuda":  # lent before a step there, too
            with ours.applied():
                assert layer.bias.place == place
        assert layer.bias.data is before
        ours.step()
        theirs.step()
        with ours.applied(), theirs.applied():
            for mine, other in zip(layer.parameters(), stayed.parameters(), strict=True):
                assert mine.place == place
                few = 8 * np.finfo(np.float32).eps * 4  # roundings, of values up to 4
                np.testing.assert_allclose(host(mine.values), other.values, rtol=0, atol=few)
    nn.utils.prune(layer, density=0.25, remap=ours)
    ours.step()


P = nn.Parameter(np.ones(3))
OTHER = {"steps": 1, "0": np.ones(4)}
REFUSED = {
    "decay": (lambda: optim.ExponentialMovingAverage([P], 1.0), ValueError, "decay"),
    "nan": (lambda: optim.ExponentialMovingAverage([P], float("nan")), ValueError, "decay"),
    "tensor": (lambda: optim.ExponentialMovingAverage(P), TypeError, "parameters takes a list"),
    "array": (lambda: optim.ExponentialMovingAverage([P.data]), TypeError, r"parameters\[0\]"),
    "too soon": (
        lambda: optim.ExponentialMovingAverage([P]).applied().__enter__(),
        RuntimeError,
        "before the first step",
    ),
    "no steps": (
        lambda: optim.ExponentialMovingAverage([P]).load_state_dict({"0": P.data}),
        ValueError,
        "state takes steps",
    ),
    "more": (
        lambda: optim.ExponentialMovingAverage([P]).load_state_dict(OTHER | {"1": P.data}),
        ValueError,
        "state takes steps and 1 averages",
    ),
    "shape": (
        lambda: optim.ExponentialMovingAverage([P]).load_state_dict(OTHER),
        ValueError,
        r"state\['0'\] takes \(3,\) of float64, got \(4,\)",
    ),
    "ops, shape": (
        lambda: ops.average_step(np.ones(3), np.ones(4), np.ones(1)),
        ValueError,
        "average takes the shape",
    ),
    "ops, dtype": (
        lambda: ops.average_step(np.ones(3, np.float32), np.ones(3), np.ones(1)),
        TypeError,
        "average takes float64",
    ),
    "ops, order": (
        lambda: ops.average_step(np.ones((3, 2)).T, np.ones((2, 3)), np.ones(1)),
        ValueError,
        "average takes a C-contiguous array, got one of strides",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
