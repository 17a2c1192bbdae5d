"""Products and gradients in layouts made from coordinates on a device, captured ones too."""

from importlib import import_module

import numpy as np
import pytest
from conftest import HALVES, host
from examples_helpers import run_python
from made_helpers import UNIT, close, made

import numbsparse as ns
from numbsparse import Layout, device
from numbsparse.dtypes import as_dtype
from numbsparse.nn import functional as F

on_gpu, weight_grad = (  # modules, which functions of the package have the names of
    import_module(f"numbsparse.kernels.matmul.k6_hopper.{name}")
    for name in ("plan_on_gpu", "weight_grad")
)
CASES = [
    # dtype, B, rung, edge, x feature-major, dy feature-major
    ("float16", 32, "k6_hopper", True, True, True),
    ("float32", 32, "auto", True, True, False),
    ("bfloat16", 64, "k6_hopper", False, False, True),
    ("float16", 32, "k5_tensor_core", True, False, False),
    ("float32", 32, "k5_tensor_core", True, True, False),
    ("float16", 32, "k8_small_batch", True, False, True),
    ("float32", 64, "k8_small_batch", False, True, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_its_products(case, rng, place, put):
    dtype, size, kernel, edge, x_across, dy_across = case
    if dtype not in ("float32", *HALVES):
        pytest.skip("ml_dtypes is not installed")
    kernel = kernel if place == "cuda" else "k0_reference" if dtype == "float32" else "auto"
    pattern = np.array([[1, 0, 1], [0, 0, 0]], bool)
    shape = tuple(n * size - 8 * edge for n in pattern.shape)
    layout, right = made(pattern, rng, put, none=1), Layout(pattern)
    n = right.n_blocks
    values = rng.standard_normal((n + 2, size, size)).astype(as_dtype(dtype))
    values[n:] = np.nan
    if edge:
        values[:n][right.index.block_columns == 2, :, -8:] = np.nan
    exact = values[:n].astype(np.float64)
    dense = ns.BlockSparse(exact, right, shape=shape).toarray()
    w = ns.BlockSparse(put(values), layout, shape=shape)

    def operand(features, across):
        a = rng.standard_normal((5, features)).astype(as_dtype(dtype))
        return (put(np.ascontiguousarray(a.T)).T if across else put(a)), a.astype(np.float64)

    (x, x64), (dy, dy64) = operand(shape[0], x_across), operand(shape[1], dy_across)
    close(ns.matmul(x, w, kernel=kernel), x64, dense, dtype)
    close(ns.matmul(dy, w.T, kernel=kernel), dy64, dense.T, dtype)
    dw = ns.sddmm(x.T, dy, w if edge else layout, block_size=size, kernel=kernel)
    got = host(dw.values)
    assert not got[n:].any()
    kept = ns.BlockSparse(got[:n], right, shape=shape).toarray()
    full = np.zeros_like(kept, np.float64)
    for i, j in np.argwhere(pattern):
        at = np.s_[i * size : (i + 1) * size, j * size : (j + 1) * size]
        full[at] = (x64.T @ dy64)[at]
    bound = 2 * UNIT[dtype] * abs(full) + 16 * 2**-23 * (abs(x64.T) @ abs(dy64))
    assert (abs(kept.astype(np.float64) - full) <= bound).all()


ALONE = """
import numpy as np
import numbsparse as ns
places = ns.to_device(np.array([0]))
layout = ns.Layout.on_device(places, places, (1, 1))
x = np.ones((3, 32), "float16")
w = ns.BlockSparse(ns.to_device(np.ones((1, 32, 32), x.dtype)), layout)
for kernel in ("k5_tensor_core", "k6_hopper", "k8_small_batch"):
    for dtype in ("float16", "float32"):
        x, w = ns.to_device(np.ones((3, 32), dtype)), w.astype(dtype)
        for y in (ns.matmul(x, w, kernel=kernel), ns.matmul(x, w.T, kernel=kernel)):
            assert (y.numpy() == 32).all()
        assert (ns.sddmm(x.T, x, layout, kernel=kernel).values.numpy() == 3).all()
"""


@pytest.mark.slow
def test_a_program_that_imports_the_library_alone_has_all_its_products():
    """The plans on a GPU are registered where rungs are loaded; tests load more than that."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    run = run_python(ALONE)
    assert run.returncode == 0, run.stderr


def test_of_what_is_cut_nothing_is_added_that_no_item_left(rng, monkeypatch):
    """There is room for more than is cut, with anything in it: here the numbers of blocks."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    monkeypatch.setattr(weight_grad, "multiprocessors", lambda: 4)
    monkeypatch.setattr(on_gpu, "empty", lambda *of: device.to_device(np.zeros(*of)))
    pattern = np.ones((int(rng.integers(3, 5)), 5), bool)  # an item a column, of which one is cut
    layout, right = made(pattern, rng, ns.to_device), Layout(pattern)
    x, dy = (rng.standard_normal((260, 32 * n), np.float32) for n in pattern.shape)
    dw = ns.sddmm(ns.to_device(x).T, ns.to_device(dy), layout, kernel="k6_hopper")
    kept = ns.BlockSparse(host(dw.values)[: right.n_blocks], right).toarray()
    *_, cut, numbers, _ = max(layout.device_index.plans.values(), key=len)
    assert 0 < numbers.numpy()[1] < cut.size
    exact, size = x.T.astype(float) @ dy, abs(x.T.astype(float)) @ abs(dy)
    assert (abs(kept - exact) <= 2.0**-21 * size).all()


@pytest.mark.parametrize("size", [32, 64, 128])
def test_few_blocks_and_a_long_batch(size, rng, monkeypatch):
    """What their steps leave is added; a step is as long here as many."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    for module in (weight_grad, on_gpu.plans):
        monkeypatch.setattr(module, "multiprocessors", lambda: 30)
    monkeypatch.setattr(on_gpu, "A_STEP", 100.0)
    monkeypatch.setattr(on_gpu.plans, "DEEP", 0)
    pattern = rng.random((3, 4) if size == 32 else (2, 2)) < 0.6
    pattern[0, 0] = True
    layout, right = made(pattern, rng, ns.to_device), Layout(pattern)
    x, dy = (rng.standard_normal((520, size * n)).astype(np.float16) for n in pattern.shape)
    dw = ns.sddmm(ns.to_device(x).T, ns.to_device(dy), layout, kernel="k6_hopper")
    *_, numbers, _ = max(layout.device_index.plans.values(), key=len)
    assert numbers.numpy()[0] > 1
    kept = ns.BlockSparse(host(dw.values)[: right.n_blocks], right).toarray()
    mask = np.kron(pattern, np.ones((size, size)))
    exact = mask * (x.T.astype(float) @ dy)
    assert (abs(kept - exact) <= 2.0**-11 * abs(exact) + 1e-3).all()


def test_gradients_go_through_it(rng):
    pattern = np.array([[1, 0, 1], [1, 1, 0]], bool)
    layout = made(pattern, rng, lambda a: a)
    a, b, c = (rng.standard_normal(s) for s in ((8, 5), (5, 12), (12, 3)))

    def f(a, b, c):
        hidden = F.gelu(F.relu(ns.sddmm(a, b, layout, block_size=4)))
        return F.sum(F.tanh(ns.matmul(hidden, c)))

    ns.testing.check_grads(f, a, b, c)


@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_are_zeros_in_places_left_over(dtype, rng, put, place):
    """Whatever values and gates have there: a norm over a gradient sees all of it."""
    dtype = "float32" if place == "cpu" else dtype
    pattern = np.array([[1, 0, 1], [0, 1, 0]], bool)
    layout, right = made(pattern, rng, put), Layout(pattern)
    values = rng.standard_normal((5, 32, 32)).astype(dtype)
    gates = np.float32([0.5, 0, -2, np.nan, np.inf])
    values[3:] = np.nan
    w = ns.Tensor(ns.BlockSparse(put(values), layout), requires_grad=True)
    gate = ns.Tensor(put(gates), requires_grad=True)
    x, dy = (rng.standard_normal((4, n)).astype(dtype) for n in (64, 96))
    F.sum(F.matmul(put(x), w, gate=gate) * ns.Tensor(put(dy))).backward()
    dw, dg = host(w.grad.matrix.values), host(gate.grad.data)
    assert not dw[3:].any()
    assert not dg[3:].any()
    full = ns.BlockSparse.from_dense(x.T.astype(np.float64) @ dy, right, block_size=32).data
    size = ns.BlockSparse.from_dense(abs(x.T) @ abs(dy), right, block_size=32).data
    exact = full * gates[:3, None, None]
    assert (abs(dw[:3] - exact) <= 8 * UNIT[dtype] * size * abs(gates[:3, None, None])).all()
    slopes = np.where(gates[:3] == 0, 0, (full * values[:3]).sum((1, 2)))
    bound = 8 * UNIT[dtype] * (size * abs(values[:3])).sum((1, 2))
    assert (abs(dg[:3] - slopes) <= bound).all()


def test_gates_of_a_transposed_weight_are_in_the_order_of_its_values_on_the_tape_too(rng, put):
    pattern = np.array([[1, 0, 1], [0, 1, 0]], bool)
    layout, right = made(pattern, rng, put), Layout(pattern)
    values = rng.standard_normal((5, 32, 32)).astype(np.float32)
    gates = np.float32([0.5, 0, -2, 0, 0])
    w = ns.Tensor(ns.BlockSparse(put(values), layout).T, requires_grad=True)
    gate = ns.Tensor(put(gates), requires_grad=True)
    x, dy = (rng.standard_normal((4, n)).astype(np.float32) for n in (96, 64))
    y = F.matmul(put(x), w, gate=gate)
    F.sum(y * ns.Tensor(put(dy))).backward()
    gated = ns.BlockSparse(values[:3] * gates[:3, None, None], right).toarray()
    close(y.data, x, gated.T, "float32")
    full = ns.BlockSparse.from_dense(dy.T.astype(float) @ x, right, block_size=32).data
    slopes = np.where(gates[:3] == 0, 0, (full * values[:3]).sum((1, 2)))
    np.testing.assert_allclose(host(gate.grad.data)[:3], slopes, rtol=1e-4, atol=1e-3)


def test_a_captured_step_makes_it_anew(rng):
    if not device.is_available():
        pytest.skip(device.why_unavailable())

    def step(rows, columns, x, values):
        layout = Layout.on_device(rows, columns, (2, 3), capacity=4)
        return ns.matmul(x, ns.BlockSparse(values, layout))

    graph = ns.graph(step)
    x = rng.standard_normal((2, 64)).astype(np.float16)
    values = rng.standard_normal((4, 32, 32)).astype(np.float16)
    for places in ([5, 1, -1], [0, 4, 2], [3, -1, -1]):
        rows, columns = np.array(places) // 3, np.array(places) % 3
        y = graph(rows, columns, x, values)
        kept = np.zeros((2, 3), bool)
        kept[rows[rows >= 0], columns[rows >= 0]] = True
        w = ns.BlockSparse(values[: kept.sum()].astype(np.float64), kept)
        close(y, x.astype(np.float64), w.toarray(), "float16")
    assert graph.captures == (not device.SIMULATED)
    graph(np.array([1, 1, -1]), np.array([2, 2, 0]), x, values)  # by a replay
    with pytest.raises(ValueError, match="1 blocks a second time, 0 from outside"):
        ns.synchronize()
