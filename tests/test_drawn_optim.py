"""Whole trainings against float64: every two choices meet once, and more are drawn."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from conftest import HALVES, host
from drawn import (
    IMPOSSIBLE,
    ORDERS,
    SEED,
    Operand,
    Suite,
    assert_within,
    drawn,
    draws,
)
from drawn_steps import BETAS, OPTIONS, Exact, options_of
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.nn import optim

SIMULATED = device.SIMULATED and device.is_available()
B = 4
GRID = (3, 4)
SHAPE = (11, 14)  # of the block-sparse matrix: no multiples of B
SPARSE = ["random", "one block", "none", "full", "transposed"]
SOME_ORDERS = ["C", "F, gaps", "C, offset", "every second value", "one row repeated"]
LAST = ("vector", "C")  # the second parameter, which has a gradient in each step


def factors_of(place):
    orders = list(ORDERS) if place == "cpu" or not SIMULATED else SOME_ORDERS
    return {
        "optimizer": list(OPTIONS),
        "numbers": ["float32", "float64"] if place == "cpu" else ["float32", *HALVES],
        "form": ["vector", "matrix", "number", "empty", *SPARSE],
        "order": [order for order in orders if order not in IMPOSSIBLE[LIBRARY[place]]],
        "decay": [0.0, 0.1],
        "betas": list(BETAS),
        "eps": [1e-8, 1e-3],
        "frozen": ["never", "at first", "every second", "always"],
        "clip": [None, 0.5, 1e6],
        "scale": [None, 1.0, 256.0],
        "bad": [None, 0, 1],  # the step in which a gradient is infinite, under a scaler
        "lr": ["constant", "falling"],
        "between": ["nothing", "checkpoint", "file", "weights", "layout"],
        "steps": [1, 2, 4],
    }


LIBRARY = {"cpu": "numpy", "cuda": "numbsparse"}


def allowed(case):
    """Whether it is a case, or one that is begun."""
    of = case.get
    if of("order", "C") != "C" and of("form", "matrix") != "matrix":
        return False
    if of("optimizer", "Adam") not in ("Adam", "AdamW") and (
        of("betas", "usual") != "usual" or of("eps", 1e-8) != 1e-8
    ):
        return False
    if of("bad") is not None and ("scale" in case and case["scale"] is None):
        return False
    if of("between") == "layout" and of("form", "random") not in SPARSE:
        return False
    return of("steps", 4) > 1 or of("between", "nothing") == "nothing"


class Trained:
    """A parameter, how it is drawn, and what it should be."""

    def __init__(self, rng, form, order, dtype, place, frozen="never"):
        self.rng, self.form, self.order, self.dtype, self.place = rng, form, order, dtype, place
        self.frozen, self.pattern = frozen, pattern_of(rng, form)
        self.p = nn.Parameter(self.data(self.draw()))
        self.exact = Exact(host(self.p.data), float(finfo(self.wide).eps) / 2)

    @property
    def wide(self):
        return np.dtype(np.float32) if self.dtype.itemsize == 2 else self.dtype

    def draw(self):
        shape = {"number": (), "vector": (9,), "matrix": (5, 7), "empty": (0, 3)}
        return self.rng.standard_normal(shape.get(self.form, SHAPE)).astype(self.dtype)

    def data(self, dense):
        """As a Parameter holds it; beyond the edge of a block-sparse matrix there are NaNs."""
        if self.form not in SPARSE:
            return ns.to_device(dense) if self.place == "cuda" else dense
        transposed = self.form == "transposed"
        dense, pattern = (dense.T, self.pattern.T) if transposed else (dense, self.pattern)
        whole = np.full([n * B for n in pattern.shape], np.nan, dense.dtype)
        whole[: dense.shape[0], : dense.shape[1]] = dense
        matrix = ns.BlockSparse.from_dense(whole, pattern, block_size=B)
        matrix = ns.BlockSparse(matrix.values, pattern, shape=dense.shape).to(self.place)
        return matrix.T if transposed else matrix

    def is_frozen(self, step):
        return {"never": False, "at first": step < 2, "every second": step % 2, "always": True}[
            self.frozen
        ]

    def give(self, scale, bad):
        """A gradient that bears the scale; its values without."""
        g = (self.draw().astype(float) * scale).astype(self.dtype)
        if bad and g.size:
            g[(0,) * g.ndim] = np.inf
        self.operand = None
        if self.form == "matrix":
            self.operand = Operand(g, self.order, LIBRARY[self.place], self.place)
            g = self.operand.values
        data = self.data(g) if self.operand is None else self.operand.array
        self.p.grad = ns.Tensor(data)
        return host(data).astype(float) / scale  # zero outside the kept blocks


def pattern_of(rng, form):
    if form == "none":
        return np.zeros(GRID, bool)
    if form in ("one block", "full"):
        pattern = np.full(GRID, form == "full")
    else:
        pattern = rng.random(GRID) < 0.5
    pattern[-1, -1] = True  # at both edges
    return pattern


def check(place, case, seed=0):
    rng = np.random.default_rng([SEED, seed])
    dtype = as_dtype(case["numbers"])
    trained = [
        Trained(rng, case["form"], case["order"], dtype, place, case["frozen"]),
        Trained(rng, *LAST, dtype, place),
    ]
    kind, options = options_of(case)
    optimizer = getattr(optim, kind)([t.p for t in trained], lr=0.1, **options)
    scaler = None if case["scale"] is None else optim.LossScaler(case["scale"], interval=2)
    for step in range(case["steps"]):
        if step == 1:
            optimizer = altered(case["between"], optimizer, trained, rng)
        optimizer.lr = lr = 0.1 / (1 + step) if case["lr"] == "falling" else 0.1
        one_step(case, step, trained, optimizer, scaler, partial(step_of, kind, lr, options))
    state = optimizer.state_dict()
    for i, t in enumerate(trained):
        assert state.get(f"{i}.steps", 0) == t.exact.t
        got, unit = host(t.p.data).astype(float), float(finfo(dtype).eps)
        within, master = t.exact.off["p"] * 1.0, state.get(f"{i}.master")
        if dtype.itemsize == 2:
            if master is not None and t.exact.is_stepped:  # only a step makes it follow p
                assert_within(host(master), kept(t, t.exact.p), kept(t, within))
            within += unit / 2 * (abs(t.exact.p) + within) + float(finfo(dtype).smallest_subnormal)
        assert got.shape == t.exact.p.shape
        assert_within(got, kept(t, t.exact.p), kept(t, within))


def kept(t, dense):
    """Zeros outside the kept blocks."""
    return dense * mask_of(t) if t.form in SPARSE else dense


def mask_of(t):
    rows, columns = SHAPE
    return np.kron(t.pattern, np.ones((B, B)))[:rows, :columns]


def filed(state):
    """As it comes from a file."""
    with TemporaryDirectory() as folder:
        ns.save(Path(folder) / "state.npz", state)
        return ns.load(Path(folder) / "state.npz")


def step_of(kind, lr, options, exact, g, g_off):
    exact.step(kind, lr, g, g_off, **options)


def one_step(case, step, trained, optimizer, scaler, exact_step):
    scale = 1.0 if scaler is None else scaler.state_dict()["scale"]
    bad = scaler is not None and case["bad"] == step
    given = {}
    for t in trained:
        t.p.grad = None
        if not t.is_frozen(step):
            given[t] = t.give(scale, bad and t is trained[-1])
    before = {t: t.p.grad for t in given}
    offs = {t: np.zeros(g.shape) for t, g in given.items()}
    if case["clip"] is not None:
        got = nn.utils.clip_grad_norm([t.p for t in trained], case["clip"], scaler=scaler)
        given, offs = clipped(given, case["clip"], got.item(), scale)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        assert scaler.state_dict()["scale"] == scale / 2 if bad else True
    for t, tensor in before.items():  # the arrays that were given are as they were
        assert t.operand is None or (t.operand.unchanged() and tensor.data is t.operand.array)
    for t, g in {} if bad else given.items():
        exact_step(t.exact, g, offs[t])


def clipped(given, most, norm, scale):
    """Gradients and bounds of their errors, after the norm was held against its own."""
    right = np.sqrt(sum((g**2).sum() for g in given.values()))
    if not np.isfinite(right):
        assert not np.isfinite(norm)
        return given, {t: np.zeros(g.shape) for t, g in given.items()}
    off = (4 + sum(g.size for g in given.values()) / 2) * 2.0**-24  # relative, of a sum of squares
    assert abs(norm - right) <= off * right
    share, offs = min(1.0, most / right) if right else 1.0, {}
    for t, g in given.items():
        info = finfo(t.dtype)  # rounded once more
        offs[t] = (off + 2.0**-23 + float(info.eps) / 2) * abs(share * g)
        offs[t] += float(info.smallest_subnormal) / scale
        offs[t] *= share < 1
    return {t: share * g for t, g in given.items()}, offs


def altered(between, optimizer, trained, rng):
    """What a training may meet after its first step; the optimizer that goes on."""
    if between in ("checkpoint", "file"):
        state = optimizer.state_dict()
        optimizer = type(optimizer)(optimizer.parameters, lr=1.0)  # the settings are the state's
        optimizer.load_state_dict(filed(state) if between == "file" else state)
    if between in ("weights", "layout"):
        t, before = trained[0], trained[0].pattern
        if between == "layout":
            t.pattern = np.roll(before, 1, axis=1)
            t.pattern[-1, -1] = before[-1, -1]
        drawn = t.draw()
        # A weight that is set to what it was keeps its master.
        drawn = np.where(drawn == host(t.p.data), drawn + drawn, drawn).astype(t.dtype)
        t.p.data = t.data(drawn)
        optimizer.remap()
        both = np.kron(before & t.pattern, np.ones((B, B)))[: SHAPE[0], : SHAPE[1]]
        t.exact.remap(host(t.p.data), both if t.form in SPARSE else 1.0)
    return optimizer


# Beyond the edge there are NaNs, and a skipped step has an infinite gradient.
pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|overflow):RuntimeWarning")

SUITE = Suite(factors_of, lambda place, case: allowed(case), check)


@pytest.mark.parametrize(("place", "number"), SUITE.numbers())
def test_every_two_choices(place, number):
    SUITE.run(place, number)


@pytest.mark.parametrize("place", SUITE.places)
@pytest.mark.slow
def test_pairs_that_are_left_out_are_in_no_case(place):
    """`pytest -s -k left_out` says how many cases there are, and how many pairs they cover."""
    SUITE.check_left_out(place)


@pytest.mark.slow
@pytest.mark.parametrize("place", SUITE.places)
def test_drawn(place):
    @draws(200 if place == "cpu" else 30, "optimizers", place)
    @given(case=drawn(factors_of(place), allowed), number=st.integers(0, 2**32 - 1))
    def run(case, number):
        check(place, case, number)

    run()


@pytest.mark.parametrize("optimizer", OPTIONS)
@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_what_is_right_is_as_torch(optimizer):
    """The meaning in float64 that all the others are held against."""
    import torch

    @draws(40, "torch", optimizer)
    @given(
        st.sampled_from([0.0, 0.1]),
        st.sampled_from(list(BETAS)),
        st.sampled_from([1e-8, 1e-3]),
        st.lists(st.booleans(), min_size=1, max_size=6),
        st.integers(0, 2**32 - 1),
    )
    def run(decay, betas, eps, present, seed):
        case = {"optimizer": optimizer, "decay": decay, "betas": betas, "eps": eps}
        rng, (kind, options) = np.random.default_rng(seed), options_of(case)
        exact, p = Exact(rng.standard_normal(5), 0.0), torch.zeros(5, dtype=torch.float64)
        p[:] = torch.from_numpy(exact.p)
        p.requires_grad = True
        theirs = getattr(torch.optim, kind)([p], lr=0.1, **options)
        for there in present:
            g = rng.standard_normal(5)
            p.grad = torch.from_numpy(g) if there else None
            theirs.step()
            if there:
                exact.step(kind, 0.1, g, 0.0, **options)
        np.testing.assert_allclose(exact.p, p.detach().numpy(), rtol=1e-11, atol=1e-13)

    run()
