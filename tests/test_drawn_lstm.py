"""Whole calls of recurrent cells against float64: every two choices meet once, more are drawn."""

from functools import cache, partial

import drawn_large as large
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
from drawn_rounded import SURE, Arithmetic, Near, gradients
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device
from numbsparse.kernels.matmul.k0_cpu import lines
from numbsparse.ops import lstm_streamed

SIMULATED = device.SIMULATED and device.is_available()
SIMULATED_WORK = 20_000  # multiplications: simulated threads are slow
MOST_SEQUENCES = 40
LARGE_WORK = 2**26  # numbers that float64 adds up for gradients of the weights

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
    some = np.sort(rng.permutation(size.batch)[:MOST_SEQUENCES])  # those that float64 computes
    exact = {"x": np.nan_to_num(problem.operands[-1].values.astype(float))[:, some]}
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
    exact |= {name: exact[name][..., some, :] for name in "hc"}
    leaves, nodes = problem.right(**exact, some=some)
    rights = {name: stacked([node.near for node in own], several or name == "y")
              for name, own in nodes.items()}  # fmt: skip
    for name, result in results.items():
        dtype = problem.wide if name == "c" else problem.dtype
        assert (result.dtype, result.place, result.requires_grad) == (dtype, place, bool(wanted))
        rows = fine if name == "y" else fine[-1]
        got = as_numpy(result.data)
        assert np.isfinite(got[np.broadcast_to(rows, got.shape[:-1])].astype(float)).all()
        compare(got, rights[name], rows, some)
    if wanted:
        back(problem, results, wanted, leaves, nodes, some)
    assert all(operand.unchanged() for operand in problem.operands)


def back(problem, results, wanted, leaves, nodes, some):
    """The gradients; none comes from sequences that float64 does not compute."""
    case, seeds, dys = problem.case, [], {}
    for name in "yhc" if case["ends"] == "all" else case["ends"]:
        values = problem.rng.standard_normal(results[name].shape)
        others = np.delete(np.arange(values.shape[-2]), some)
        values[..., others, :] = 0
        dys[name] = problem.put(values, case["dy"], dtype=results[name].dtype)
        exact = problem.operands[-1].values.astype(float)[..., some, :]
        exact = exact if problem.several or name == "y" else exact[None]
        seeds += [(node, Near(d, problem.how)) for node, d in zip(nodes[name], exact, strict=True)]
    if len(dys) == 1:
        (output,), (dy,) = (results[name] for name in dys), dys.values()
    else:
        y, h, c = ((results[name] * dy).sum() for name, dy in dys.items())
        output, dy = y + h + c.astype(y.dtype), None
    found = ns.grad(output, [*wanted.values()], grad_output=dy)
    right = gradients(seeds)
    rows = np.ones(results["y"].shape[1], bool)
    if case["values"] == "NaN":
        rows[len(rows) // 2] = False
    for (name, tensor), got in zip(wanted.items(), found, strict=True):
        assert (got.dtype, got.place, got.shape) == (tensor.dtype, tensor.place, tensor.shape)
        exact = right[leaves[name]].stored()
        if name in ("x", "h", "c"):
            assert not as_numpy(got.data)[..., others, :].any()
            compare(as_numpy(got.data), exact, rows, some)
        elif rows.all():
            problem.items[name].check(got.data, exact)
    if case["way"] == "again":
        for one, other in zip(
            found, ns.grad(output, [*wanted.values()], grad_output=dy), strict=True
        ):
            one, other = (as_numpy(a.values).astype(float) for a in (one, other))
            np.testing.assert_array_equal(one, other)


def stacked(nears, several):
    if not several:
        return nears[0]
    return Near(
        np.stack([a.value for a in nears]), nears[0].how, np.stack([a.error for a in nears])
    )


def compare(got, right, rows, some):
    """(..., batch, features): of some sequences those that no NaN reaches."""
    got = got[..., some, :]
    assert got.shape == right.shape
    rows = np.broadcast_to(rows[..., some], got.shape[:-1])
    assert_within(got[rows], right.value[rows], SURE * right.error[rows])


@pytest.fixture(autouse=True)
def no_few_rows(cheap_products, monkeypatch):
    """On the CPU each kernel for few rows takes a second to compile."""
    monkeypatch.setattr(lines, "pays", lambda *of: False)


pytestmark = pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")

SUITE = Suite(factors_of, allowed, check)


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


@pytest.mark.parametrize("place", SUITE.places)
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


def test_both_factors_of_a_square_err_alike():
    near = Near(np.full(1, 3.0), Arithmetic(eps=0, stored=0, least=0), 1e-3)
    assert near.squared().error >= (3.001**2 - 9) * (1 - 1e-6)


@pytest.mark.parametrize("place", SUITE.places)
def test_drawn(place):
    @draws(10 if place == "cpu" else 4, "cells", place)
    @given(case=drawn(factors_of(place), partial(allowed, place)), number=st.integers(0, 2**32 - 1))
    def run(case, number):
        check(place, case, number)

    run()


def large_factors(rng):
    """Widths and sequences as they come, of which float64 computes some."""
    own, on_gpu = factors_of(large.PLACE), large.ON_GPU
    return own | {
        "size": [8, 16, 32, 32, 32, 64] if on_gpu else own["size"],
        "units": large.sizes(rng, 1, 4096 if on_gpu else 16),
        "features": large.sizes(rng, 1, 2048 if on_gpu else 16),
        "steps": [1, 2, 5, 10] if on_gpu else [1, 2],
        "batch": large.sizes(rng, 1, 600 if on_gpu else 9),
        "library": [name for name in own["library"] if name != "jax"],
        "dy": [order for order in own["dy"] if order != "one row repeated"],
        "values": ["normal", "wide"],
    }


def large_allowed(case):
    if case.keys() >= {"units", "features", "steps", "cell"}:
        layers = 2 if "two" in case["cell"] else 1
        numbers = 4 * case["units"] * (case["features"] + layers * case["units"])
        if numbers * case["steps"] > LARGE_WORK:
            return False
    if SIMULATED and not case.keys() >= {"units", "features"}:
        case = {name: case[name] for name in case if name not in ("units", "features")}
    return allowed(large.PLACE, case)


def test_large(number):
    check(large.PLACE, large.large_case(number, large_factors, large_allowed), number)
