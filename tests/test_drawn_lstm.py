"""Whole calls of recurrent cells against float64: every two choices meet once, more are drawn."""

from functools import cache, partial

import numpy as np
import pytest
from conftest import HALVES
from drawn import (
    IMPOSSIBLE,
    SEED,
    Suite,
    as_numpy,
    assert_within,
    drawn,
    draws,
    has_arrays,
    libraries,
)
from drawn_cells import Problem, pattern_of, size_of
from drawn_rounded import SURE, Near, gradients
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device
from numbsparse.kernels.matmul.k0_cpu import lines
from numbsparse.ops import lstm_streamed

SIMULATED = device.SIMULATED and device.is_available()
SIMULATED_WORK = 20_000  # multiplications: simulated threads are slow

ORDERS = ["C", "batch first", "F", "C, gaps", "C, offset", "every second value", "one row repeated",
          "F, both reversed", "read-only", "unaligned", "field"]  # fmt: skip
OF_VECTORS = ["C", "every second value", "C, offset", "columns reversed", "read-only"]


def factors_of(place):
    own = "numpy" if place == "cpu" else "numbsparse"
    there = [order for order in ORDERS if order not in IMPOSSIBLE[own]]
    few = SIMULATED and place == "cuda"
    return {
        "cell": ["LSTM", "LSTM, norm", "two LSTMs", "two LSTMs, norm", "F.lstm", "F.lstm, norm",
                 "multiplicative 2", "multiplicative 3"],
        "numbers": ["float32", *(["float64"] if place == "cpu" else [*HALVES, "float32, high"])],
        "size": [4, 8, 32] if few else [4, 8, 16, 32],
        "layout": ["random", "full", "empty lines", "one block", "none", "band", "long lines"],
        "inputs": ["random", "full", "one block", "none"],
        "features": ["whole", "a quarter less", "ragged", "ragged inputs"],
        "steps": [1, 2, 5],
        "batch": [0, 1, 7, 9] if few else [0, 1, 7, 8, 33],
        "drops": [False, True],
        "state": ["none", "arrays", "tensors"],
        "library": [name for name in libraries(place) if place == "cpu" or name != "numpy"],
        "x": [*there[:4], "C, offset", "every second value"] if few else there,
        "of state": there[1::2] if few else there,
        "dy": there[::2] if few else there,
        "vectors": [order for order in OF_VECTORS if order not in IMPOSSIBLE[own]],
        "w": ["C", "C, offset", *(["read-only"] if place == "cpu" else [])],
        "ends": ["all", "y", "h", "c"],
        "wants": ["all", "x", "state", "parameters", "recurrent", "vectors", "none"],
        "way": ["once", "again", "recompute"],
        "values": ["normal", "wide", "NaN"],
    }  # fmt: skip


OF_STREAMS = [  # where kernels stream the recurrent weight: two cases, as the simulator takes long
    {
        **{"cell": "LSTM", "size": 32, "inputs": "one block", "batch": 5, "drops": True},
        **{"state": "tensors", "library": "numbsparse", "x": "C, offset", "dy": "F"},
        **{"of state": "batch first", "vectors": "C, offset", "w": "C", "ends": "all"},
        **{"wants": "all", "way": "once", "values": "normal", "numbers": numbers},
        **{"layout": layout, "features": features, "steps": steps},
    }
    for numbers, layout, features, steps in (
        (HALVES[-1], "long column", "a quarter less", 2),
        ("float32, high", "long row", "ragged inputs", 2),
    )
]


def allowed(place, case):
    """Whether there is such a call, or one that goes on like this."""
    of = case.get
    if {of("x"), of("of state")} & {*IMPOSSIBLE.get(of("library"), [])}:
        return False
    if not has_arrays(of("library"), of("numbers")):
        return False
    if of("state") == "none" and (of("cell", "")[:2] == "F." or of("wants") == "state"):
        return False
    if of("state") == "arrays" and of("wants") == "state":
        return False
    if of("values") == "NaN" and (of("batch") in (0, 1) or of("x") == "one row repeated"):
        return False
    if of("wants") == "none" and (of("way", "once") != "once" or of("ends", "all") != "all"):
        return False
    if place == "cpu" and not is_compiled(of("numbers"), of("size"), of("batch", 0)):
        return False
    return not (SIMULATED and place == "cuda") or work_of(case) <= SIMULATED_WORK


def is_compiled(numbers, size, batch):
    """Whether the CPU's tile of registers is one of few: each takes ten seconds to compile.

    Other tiles in either dtype are those of products, and `test_drawn_products` has them.
    """
    if numbers == "float64":
        return size != 4 and batch in (0, 7, 8)
    return size != 4 or batch <= 8


@cache
def kept_blocks(kind, rows, columns):
    return pattern_of(np.random.default_rng(0), kind, rows, columns).sum()


def work_of(case):
    """Multiplications of a forward pass, at least, where some factors are not chosen yet."""
    least = {"cell": "LSTM", "numbers": "float32", "size": 4, "features": "whole", "steps": 1}
    least |= {"batch": 1, "layout": "none", "inputs": "none", "way": "once", "wants": "none"}
    of = least | case
    size = size_of("cuda", of)
    recurrent = kept_blocks(of["layout"], size.blocks, size.blocks)
    inputs = kept_blocks(of["inputs"], size.in_blocks, size.blocks)
    each, each_input = 4, 4 if "cell" in case else 2  # a multiplicative cell has fewer of inputs
    if of["cell"][:4] == "mult":
        each, each_input = 4 + int(of["cell"][-1]), 2
    passes = 1 + (of["way"] != "once") + 2 * (of["wants"] != "none")
    rows = size.steps * max(size.batch, 1) * size.layers
    return passes * rows * (each * (recurrent + 1) + each_input * inputs) * size.B**2


def check(place, case, seed=0):
    """One call and its gradients: their values and types, and that nothing else was written."""
    try:
        check_within(place, case, seed, 0)
    except AssertionError:
        check_within(place, case, seed, SAMPLES)


def check_within(place, case, seed, samples):
    rng = np.random.default_rng([SEED, seed])
    problem = Problem(place, case, rng)
    size, several = problem.size, problem.several
    xs = rng.standard_normal((size.steps, size.batch, size.inputs))
    if case["values"] == "wide":
        xs *= 2.0 ** rng.integers(-4, 5, xs.shape)
    fine = np.ones((size.steps, size.batch), bool)
    lost = size.steps // 2, size.batch // 2
    if case["values"] == "NaN":
        fine[lost[0] :, lost[1]], xs[lost] = False, np.nan
    x = problem.put(xs, case["x"], case["library"])
    exact = {"x": np.nan_to_num(problem.operands[-1].values.astype(float))}
    shape, state = (*[size.layers] * several, size.batch, size.units), []
    for name, dtype in (("h", problem.dtype), ("c", problem.wide)):
        exact[name] = np.zeros(shape)
        if case["state"] != "none":
            values = rng.uniform(-1, 1, shape)
            state.append(problem.put(values, case["of state"], case["library"], dtype))
            exact[name] = problem.operands[-1].values.astype(float)

    wants = case["wants"]
    inputs = {"x": ns.Tensor(x, requires_grad=wants in ("all", "x"))}
    if case["state"] == "tensors":
        state = [ns.Tensor(a, requires_grad=wants in ("all", "state")) for a in state]
        inputs |= zip("hc", state, strict=True)
    for name, tensor in problem.tensors.items():
        kind = "vectors" if name.endswith(("bias", "gain")) else "inputs"
        kind = "recurrent" if name.endswith(("weight_hh", "internal.0.weight")) else kind
        tensor.requires_grad = wants in ("all", "parameters", kind)
    wanted = {n: a for n, a in (inputs | problem.tensors).items() if a.requires_grad}
    way = partial(ns.nn.recompute, problem.call) if case["way"] == "recompute" else problem.call
    y, last = way(inputs["x"], state or None)
    results = dict(zip("yhc", (y, *last), strict=True))
    rights = expected(problem, exact, None, samples)
    for name, result in results.items():
        dtype = problem.wide if name == "c" else problem.dtype
        assert (result.dtype, result.place, result.requires_grad) == (dtype, place, bool(wanted))
        rows = fine if name == "y" else fine[-1]
        compare(as_numpy(result.data), rights[name], rows)
    if wanted:
        back(problem, results, wanted, exact, samples)
    assert all(operand.unchanged() for operand in problem.operands)


def back(problem, results, wanted, exact, samples):
    case, seeds, dys = problem.case, {}, {}
    for name in "yhc" if case["ends"] == "all" else case["ends"]:
        values = problem.rng.standard_normal(results[name].shape)
        dys[name] = problem.put(values, case["dy"], dtype=results[name].dtype)
        seeds[name] = problem.operands[-1].values.astype(float)
    if len(dys) == 1:
        (output,), (dy,) = (results[name] for name in dys), dys.values()
    else:
        y, h, c = ((results[name] * dy).sum() for name, dy in dys.items())
        output, dy = y + h + c.astype(y.dtype), None
    found = ns.grad(output, [*wanted.values()], grad_output=dy)
    right = expected(problem, exact, seeds, samples)
    rows = np.ones(results["y"].shape[1], bool)
    if case["values"] == "NaN":
        rows[len(rows) // 2] = False
    for (name, tensor), got in zip(wanted.items(), found, strict=True):
        assert (got.dtype, got.place, got.shape) == (tensor.dtype, tensor.place, tensor.shape)
        if name in ("x", "h", "c"):
            compare(as_numpy(got.data), right[name], rows)
        elif rows.all():
            problem.items[name].check(got.data, right[name])
    if case["way"] == "again":
        for one, other in zip(
            found, ns.grad(output, [*wanted.values()], grad_output=dy), strict=True
        ):
            one, other = (as_numpy(a.values).astype(float) for a in (one, other))
            np.testing.assert_array_equal(one, other)


def expected(problem, exact, dys, samples):
    """The results by name, or with `dys`, gradients of results by name, those of the leaves.

    An error is six deviations at least of so many `samples`, each with roundings of its own: these
    are even, so a sum of them is further away once in 65 million times.
    """
    right, how, squares = nears_of(problem, exact, dys), problem.how, {}
    for sample in range(samples):
        problem.how = how._replace(draws=np.random.default_rng(sample))
        for name, near in nears_of(problem, exact, dys).items():
            square = (near.value - right[name].value) ** 2
            squares[name] = squares.get(name, 0) + square / samples
    problem.how = how
    for name, square in squares.items():
        right[name].error = np.maximum(right[name].error, 6 / SURE * np.sqrt(square))
    return right


def nears_of(problem, exact, dys):
    leaves, nodes = problem.right(**exact)
    if dys is None:
        return {name: stacked([node.near for node in own], problem.several or name == "y")
                for name, own in nodes.items()}  # fmt: skip
    seeds = []
    for name, values in dys.items():
        values = values if problem.several or name == "y" else values[None]
        seeds += [(node, Near(d, problem.how)) for node, d in zip(nodes[name], values, strict=True)]
    found = gradients(seeds)
    return {name: found[leaf].stored() for name, leaf in leaves.items() if leaf in found}


def stacked(nears, several):
    if not several:
        return nears[0]
    return Near(
        np.stack([a.value for a in nears]), nears[0].how, np.stack([a.error for a in nears])
    )


def compare(got, right, rows):
    """(..., batch, features): the rows of the batch that no NaN reaches."""
    assert got.shape == right.shape
    rows = np.broadcast_to(rows, got.shape[:-1])
    assert_within(got[rows], right.value[rows], SURE * right.error[rows])


@pytest.fixture(autouse=True)
def no_few_rows(cheap_products, monkeypatch):
    """On the CPU each kernel for few rows takes a second to compile."""
    monkeypatch.setattr(lines, "pays", lambda *of: False)


pytestmark = pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")

SUITE = Suite(factors_of, allowed, check)
SAMPLES = 24


def test_bounds_hold_for_any_roundings(rng):
    """Where one rounding reaches a gradient along many ways, here of a norm's, over five steps."""
    case = {factor: values[0] for factor, values in factors_of("cpu").items()}
    case |= {"cell": "two LSTMs, norm", "size": 4, "layout": "band", "steps": 5, "batch": 1}
    problem = Problem("cpu", case, np.random.default_rng([SEED, 3788232268]))
    size = problem.size
    of_bfloat16 = {"stored": 0.75 * 2.0**-7, "least": 2.0**-133}
    problem.how, problem.eps = problem.how._replace(**of_bfloat16), 1e-2
    exact = {"x": rng.standard_normal((5, 1, size.inputs))}
    exact |= {name: rng.uniform(-1, 1, (2, 1, size.units)) for name in "hc"}
    dys = {"y": rng.standard_normal((5, 1, size.units))}
    right, beyond, how = expected(problem, exact, dys, SAMPLES), [], problem.how
    least = nears_of(problem, exact, dys)
    for draw in range(100):
        problem.how = how._replace(draws=np.random.default_rng([1, draw]))
        for name, near in nears_of(problem, exact, dys).items():
            off = abs(near.value - right[name].value)
            assert (off <= SURE * right[name].error).all()
            beyond.append((off > SURE * least[name].error).any())
    assert any(beyond)


@pytest.mark.parametrize(("place", "number"), SUITE.numbers())
def test_every_two_choices(place, number):
    SUITE.run(place, number)


@pytest.mark.parametrize("number", range(len(OF_STREAMS)))
@pytest.mark.simulator
def test_streamed(number, monkeypatch):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    ran = []
    for name in ("forward", "backward"):
        run = getattr(lstm_streamed.Streamed, name)

        def noted(*args, run=run, **how):
            ran.append(run.__name__)
            run(*args, **how)

        monkeypatch.setattr(lstm_streamed.Streamed, name, noted)
    monkeypatch.setattr(lstm_streamed, "FEW_STEPS", 2)
    monkeypatch.setattr(lstm_streamed, "MOST_INPUTS", 1.0)
    print(OF_STREAMS[number])
    check("cuda", OF_STREAMS[number], number)
    if ran != ["forward", "backward"]:
        pytest.skip("takes a GPU of compute capability 9.0, or the simulator")


@pytest.mark.parametrize("place", SUITE.cases)
def test_pairs_that_are_left_out_are_in_no_case(place):
    """`pytest -s -k left_out` says how many cases there are, and how many pairs they cover."""
    SUITE.check_left_out(place)


@pytest.mark.parametrize("cell", ["two LSTMs", "F.lstm, norm", "multiplicative 3"])
def test_the_gradients_to_compare_with_are_right(cell, rng):
    """Of the float64 formulas themselves, beside central differences along random directions."""
    case = {factor: values[0] for factor, values in factors_of("cpu").items()}
    case |= {"cell": cell, "numbers": "float64", "steps": 2, "batch": 3, "drops": True}
    problem = Problem("cpu", case, rng)
    size = problem.size
    shapes = {"x": (2, 3, size.inputs)} | dict.fromkeys("hc", (size.layers, 3, size.units))
    if not problem.several:
        shapes |= dict.fromkeys("hc", (3, size.units))
    start = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    start |= {name: item.values for name, item in problem.items.items()}
    along = {name: rng.standard_normal(a.shape) for name, a in start.items()}
    dys = {name: rng.standard_normal((2, 3, size.units)) for name in "yhc"}

    def ends(step):
        moved = {name: a + step * along[name] for name, a in start.items()}
        for name, item in problem.items.items():
            item.values = moved[name]
        leaves, nodes = problem.right(**{name: moved[name] for name in "xhc"})
        own = [(node, Near(d, problem.how)) for name, many in nodes.items()
               for node, d in zip(many, dys[name], strict=False)]  # fmt: skip
        return leaves, own, sum((node.near.value * d.value).sum() for node, d in own)

    difference = (ends(1e-6)[2] - ends(-1e-6)[2]) / 2e-6
    leaves, own, _ = ends(0)
    right, slope = gradients(own), 0.0
    for name, leaf in leaves.items():
        item = problem.items.get(name)
        change = along[name]
        if item is not None:
            item.values = change
            change = item.exact()
        slope += (right[leaf].value * change).sum()
    assert abs(slope - difference) <= 1e-6 * abs(difference) + 1e-6


@pytest.mark.parametrize("place", SUITE.cases)
def test_drawn(place):
    @draws(10 if place == "cpu" else 5, "cells", place)
    @given(case=drawn(factors_of(place), partial(allowed, place)), number=st.integers(0, 2**32 - 1))
    def run(case, number):
        check(place, case, number)

    run()
