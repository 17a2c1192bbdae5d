"""The tape: gradients, gradients of gradients, and a checker that finds wrong ones."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from conftest import HALVES, host
from drawn import draws
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import nn, ops
from numbsparse.autograd import Tensor, record
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.nn import functional as F
from numbsparse.nn.functional.joint import jointly
from numbsparse.testing import check_grads

RNG = np.random.default_rng(1)
A, B, ROW = RNG.standard_normal((3, 4)), RNG.standard_normal((3, 4)), RNG.standard_normal(4)
CUBE = RNG.standard_normal((2, 3, 4))
TARGETS = np.array([0, 3, 1])
LAYOUT = ns.Layout([[1, 0, 1], [0, 1, 1]])
W = ns.BlockSparse(RNG.standard_normal((4, 4, 4)), LAYOUT, shape=(8, 11))
X, DY = RNG.standard_normal((3, 8)), RNG.standard_normal((3, 11))

TWICE = {
    "gelu": (F.gelu, A),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), A),
    "elu": (F.elu, A),
    "concat_elu": (F.concat_elu, CUBE),
    "glu": (F.glu, CUBE),
    "softmax": (F.softmax, A),
    "log_softmax": (F.log_softmax, A),
    "cross_entropy": (lambda x: F.cross_entropy(x, TARGETS), A),
    "cross_entropy, three axes": (lambda x: F.cross_entropy(x, np.ones((2, 3), int)), CUBE),
    "embedding": (lambda table: F.embedding(table, np.array([[0, 2], [2, 2]])), A),
    "embedding, squared": (lambda t: F.embedding(t * t, np.array([[0, 2], [2, 2]])), A),
    "layer_norm": (F.layer_norm, A, ROW, B[0]),
    "add": (F.add, A, B),
    "add a row": (F.add, A, ROW),
    "add a number": (lambda a: 2.5 + a + 1, A),
    "subtract": (lambda a, b: (a - b) * (1 - a), A, ROW),
    "multiply": (F.multiply, A, B),
    "multiply by a column": (F.multiply, A, B[:, :1]),
    "multiply by itself": (lambda a: a * a * a, A),
    "divide": (F.divide, A, abs(B) + 1),
    "divide a row": (lambda a, b: a / b, ROW, abs(B) + 1),
    "negative": (lambda a: -a * a, A),
    "power": (lambda a: a**3, A),
    "exp": (F.exp, A),
    "expm1": (F.expm1, A),
    "log": (F.log, abs(A) + 1),
    "sqrt": (F.sqrt, abs(A) + 1),
    "tanh": (F.tanh, A),
    "sigmoid": (F.sigmoid, A),
    "softplus": (F.softplus, A),
    "log_sigmoid": (F.log_sigmoid, A),
    "logsumexp": (F.logsumexp, CUBE),
    "relu": (lambda a: F.relu(a * a - 0.5), A),
    "sum": (lambda a: (a * a).sum(), CUBE),
    "sum over an axis": (lambda a: (a * a).sum(1), CUBE),
    "sum, axes kept": (lambda a: (a * a).sum((0, -1), keepdims=True), CUBE),
    "mean": (lambda a: (a * a).mean(-1), CUBE),
    "reshape": (lambda a: (a * a).reshape(2, -1), CUBE),
    "transpose": (lambda a: (a * a).transpose((1, 2, 0)), CUBE),
    "T": (lambda a: (a * a).T, A),
    "getitem": (lambda a: (a * a)[1, :, 1:3], CUBE),
    "concatenate": (lambda a, b: F.concatenate([a * b, b, a], axis=1), A, B),
    "stack": (lambda a, b: F.stack([a * b, b], axis=-1), A, B),
    "unbind": (lambda a: (lambda p: p[0] * p[1] + p[0])(F.unbind(a)), CUBE),
    "split": (lambda a: (lambda p: p[1] * p[0])(F.split(a, 2)), CUBE),
    "matmul": (F.matmul, X, W),
    "matmul, transposed": (lambda dy, w: F.matmul(dy, w.T), DY, W),
    "matmul, sparse first": (lambda w, x: w @ x, W, DY.T.copy()),
    "matmul, three axes": (F.matmul, RNG.standard_normal((2, 3, 8)), W),
    "matmul, squared": (lambda x, w: F.matmul(x, w) * F.matmul(x, w), X, W),
    "sddmm": (lambda a, b: F.matmul(X, F.sddmm(a, b, W)), X.T.copy(), DY),
    "sddmm, both ways": (lambda x, w: F.sddmm(x.T, x @ w, W), X, W),
    "linear": (F.linear, X, W, RNG.standard_normal(11)),
    "dropout": (lambda a: F.dropout(a * a, 0.5, seed=3), A),
    "mse_loss": (lambda a: F.mse_loss(a, B), A),
    "block-sparse arithmetic": (lambda x, w: x @ (w * 2.0 + w), X, W),
}


@pytest.mark.parametrize("name", TWICE)
def test_gradient(name):
    check_grads(*TWICE[name])


@pytest.mark.parametrize("name", TWICE)
def test_gradient_of_the_gradient(name):
    check_grads(*TWICE[name], order=2)


THRICE = [name for name in TWICE if name.startswith(("gelu", "elu", "glu", "softmax", "cross"))]


@pytest.mark.parametrize("name", THRICE)
def test_a_gradient_deeper_still(name):
    """Where the first gradient is one kernel, and the others are not."""
    check_grads(*TWICE[name], order=3)


AGAIN = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": F.elu,
    "concat_elu": F.concat_elu,
    "glu": F.glu,
    "softmax": F.softmax,
    "log_softmax": F.log_softmax,
    "cross_entropy": lambda x: F.cross_entropy(x, beside(x, TARGETS)),
    "embedding": lambda x: F.embedding(x * x, beside(x, np.array([2, 0, 2]))),
}


def beside(x, array):
    return array if x.device == "cpu" else ns.to_device(array)


def penalised(function, x, weights):
    """A gradient, recorded and not, and that of its squared length."""
    x = ns.Tensor(x, requires_grad=True)
    y = function(x)
    dy = weights[: y.size].reshape(y.shape).astype(y.dtype)
    dy = ns.Tensor(beside(x, dy))
    (first,) = ns.grad(y, [x], grad_output=dy, create_graph=True)
    (plain,) = ns.grad(y, [x], grad_output=dy)
    (second,) = ns.grad((first * first).sum(), [x])
    assert {each.dtype for each in (first, plain, second)} == {x.dtype}
    return [host(each.data).astype(float) for each in (first, plain, second)]


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("name", AGAIN)
def test_a_gradient_penalty_in_every_dtype(rng, put, place, name, dtype):
    """And the gradient that is recorded is the one that is not, within rounding."""
    if dtype != "float32" and place == "cpu":
        pytest.skip("16 bits are for the GPU")
    dtype, function = as_dtype(dtype), AGAIN[name]
    x, weights = (2 * rng.standard_normal((3, 4))).astype(dtype), rng.standard_normal(24)
    right = penalised(function, x.astype(float), weights)
    for got, expected in zip(penalised(function, put(x), weights), right, strict=True):
        off = 64 * float(finfo(dtype).eps) * (1 + abs(expected).max())
        assert abs(got - expected).max() <= off


@pytest.mark.parametrize(
    "wrong",
    [
        lambda dy, y: dy * 2.0001,
        lambda dy, y: dy + 1e-4,
        lambda dy, y: dy * np.array([1.0, 1, 1, 0]),
    ],
    ids=["scaled", "shifted", "one missing"],
)
def test_check_grads_finds_a_wrong_gradient(wrong):
    def doubled(x):
        return record(ops.multiply(x.data, 2.0), (x, lambda dy, y: wrong(dy * 2.0, y)))

    with pytest.raises(AssertionError, match="backward gives"):
        check_grads(doubled, A)


def test_check_grads_finds_a_wrong_second_gradient():
    def cube(x):
        # The first gradient is right, but it forgets that it depends on x.
        return record(x.data**3, (x, lambda dy, y: dy * ns.Tensor(3 * x.data**2)))

    check_grads(cube, A)
    with pytest.raises(AssertionError, match="backward gives"):
        check_grads(cube, A, order=2)
    with pytest.raises(AssertionError, match="backward gives"):  # of the second input too
        check_grads(lambda x, y: x * x + cube(y), A, A, order=2)


def test_check_grads_takes_float64():
    with pytest.raises(TypeError, match="float64"):
        check_grads(F.tanh, A.astype(np.float32))


def test_backward_adds_up():
    x = ns.Tensor(A, requires_grad=True)
    (x * 2.0).sum().backward()
    (x * 3.0).sum().backward()
    np.testing.assert_array_equal(x.grad.data, np.full_like(A, 5))


def test_a_weight_used_twice_gets_both_gradients(put):
    w = ns.Tensor(put(W.astype("float32")), requires_grad=True)
    x = ns.Tensor(put(X.astype(np.float32)))
    ((x @ w).sum() + (x @ w * 2.0).sum()).backward()
    once = ns.sddmm(X.T, np.ones_like(DY), W).toarray()
    np.testing.assert_allclose(host(w.grad.data), 3 * once, atol=1e-5)
    assert w.grad.data.layout == LAYOUT


def yields(x):
    yield x * 2


async def awaits(x):
    return x * 2


async def both(x):
    yield x * 2


@pytest.mark.parametrize("function", [yields, awaits, both])
def test_no_grad_decorates_no_function_that_runs_later(function):
    """Which would be outside of the context by then, and remember all."""
    with pytest.raises(TypeError, match=f"not a generator or a coroutine, got {function.__name__}"):
        ns.no_grad()(function)


def test_no_grad_records_nothing():
    x = ns.Tensor(A, requires_grad=True)
    unrecorded = ns.no_grad()
    for _ in range(2):  # one context again, and within itself
        with unrecorded:
            with unrecorded:
                assert not (x * 2.0).requires_grad
            assert not (x * 2.0).requires_grad
        assert (x * 2.0).requires_grad


def test_inputs_may_come_from_an_iterator():
    x = ns.Tensor(3.0, requires_grad=True)
    (gradient,) = ns.grad(x * x, iter([x]))
    assert gradient.item() == 6.0


def test_gradients_go_only_where_they_are_required():
    a, b = ns.Tensor(A, requires_grad=True), ns.Tensor(B)
    (a * b).sum().backward()
    assert b.grad is None
    assert ns.grad((a * a).sum(), [a, b])[1] is None


def test_a_long_chain_needs_no_recursion():
    x = y = ns.Tensor(1.0, requires_grad=True)
    for _ in range(5000):
        y = y + 0.0
    y.backward()
    assert x.grad.item() == 1


def test_a_dropped_graph_is_freed_at_once():
    x = ns.Tensor(A, requires_grad=True)
    y = F.tanh(x)
    loss = (y * y).sum()
    seen = weakref.ref(y)
    gc.disable()
    try:
        loss.backward()
        del y, loss
        assert seen() is None  # no cycle keeps it: memory returns without the collector
    finally:
        gc.enable()


X_GRAD = ns.Tensor(A, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ns.Tensor(A).sum().backward(), RuntimeError, "requires a gradient"),
        (lambda: ns.Tensor(A, requires_grad=True).backward(), ValueError, "grad"),
        (lambda: ns.Tensor(A, requires_grad=True).backward(A[0]), ValueError, "grad takes"),
        (lambda: ns.grad(X_GRAD.sum(), X_GRAD), TypeError, "inputs takes a list"),
        (lambda: ns.Tensor(TARGETS, requires_grad=True), TypeError, "int64"),
        (lambda: ns.Tensor(ns.Tensor(A)), TypeError, "detach"),
        (lambda: ns.Tensor(A) ** "2", TypeError, "exponent"),
        (lambda: ns.Tensor(W) * A, TypeError, "number"),
        (lambda: ns.Tensor(W) + A, ValueError, "b takes a BlockSparse as the other one, or 0"),
        (lambda: F.split(ns.Tensor(A), 3), ValueError, "divisor of 4"),
        (lambda: F.glu(ns.Tensor(A[:, :3])), ValueError, r"even last axis, got .*\(3, 3\)"),
        (lambda: F.dropout(ns.Tensor(A), 1.0, seed=0), ValueError, "rate"),
        (lambda: F.cross_entropy(ns.Tensor(A), np.array([0, 1, 4])), ValueError, "targets"),
        (lambda: ns.matmul(ns.Tensor(X), W, out=DY), ValueError, "out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_repr():
    assert repr(ns.Tensor([1.0, 2.0])) == "Tensor([1., 2.])"
    assert repr(ns.Tensor(np.float32([1]))) == "Tensor([1.], dtype=float32)"
    assert repr(ns.Tensor(W)).startswith("Tensor(BlockSparse(8 x 11")


def test_what_an_error_broke_off_is_not_gone_on_with():
    """Of gradients that are computed all at once: the next backward computes its own."""
    errors = [MemoryError("of the first input")]

    def vjp(dy, y):
        def first():
            if errors:
                raise errors.pop()
            return dy * 2.0

        return [first, dy * 3.0]

    a, b = Tensor(1.0, requires_grad=True), Tensor(1.0, requires_grad=True)
    y = record(np.array(5.0), *jointly(vjp, a, b, again=vjp))
    with pytest.raises(MemoryError):
        y.backward()
    a.grad = b.grad = None
    y.backward(np.array(10.0))
    assert (a.grad.item(), b.grad.item()) == (20.0, 30.0)


def test_threads_add_to_one_gradient():
    """Each has found the parameter's gradient before the other one adds its own."""
    p, met = ns.nn.Parameter(np.ones(3)), threading.Barrier(2, timeout=60)

    def waits(dy, y):
        met.wait()
        return dy

    def run(factor):
        early = Tensor(np.ones(3), requires_grad=True)
        (p * factor + record(early.data, (early, waits))).sum().backward()

    for _ in range(2):  # without a gradient at first, and with one
        with ThreadPoolExecutor() as pool:
            list(pool.map(run, [2.0, 5.0]))
    np.testing.assert_array_equal(p.grad.data, 14)


ONCE = {  # what goes back through several inputs, or the steps of a loop, at once
    "LSTM": lambda x: LSTM(x)[0],
    "MultiplicativeLSTM": lambda x: STEPS(x)[0],
    "recompute": lambda x: nn.recompute(lambda x: F.tanh(x * x), x) * 1.0,
    "jointly": lambda x: record(x.data * 3, *jointly(thirds, *[x] * 3, again=thirds)),
}
LSTM = nn.LSTM(8, 8, block_size=4, dtype="float64", seed=0)
STEPS = nn.MultiplicativeLSTM(8, 8, block_size=4, internal_steps=2, dtype="float64", seed=0)


def thirds(dy, y):
    return [dy] * 3


@draws(8, "threads back through one result")
@given(st.integers(0, 2**20), st.integers(2, 8), st.sampled_from(sorted(ONCE)))
def test_threads_go_back_through_one_result(seed, threads, kind):
    """Gradients of several losses of what was computed once are as those one after the other."""
    rng, before = np.random.default_rng(seed), sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(10):
            x = Tensor(rng.standard_normal((3, 2, 8)), requires_grad=True)
            y, dys = ONCE[kind](x), list(rng.standard_normal((3 * threads, 3, 2, 8)))
            back = partial(back_from, y, x)
            right = [back(dy) for dy in dys]
            with ThreadPoolExecutor(threads) as pool:
                found = list(pool.map(back, dys))
            np.testing.assert_array_equal(found, right)
    finally:
        sys.setswitchinterval(before)


def back_from(y, x, dy):
    return ns.grad(y, [x], grad_output=dy)[0].numpy()
