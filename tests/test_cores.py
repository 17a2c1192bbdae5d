"""Kernels on the CPU's cores: no phase begins before every core is done with the one before.

The test plays a core that is late: it takes a part of a phase, and does not finish it. Then no
count of a later phase may change, however long that takes.
"""

import os
import subprocess
import sys
from importlib import import_module
from threading import Thread

import numpy as np
import pytest
from conv_helpers import ConvCase, ConvProblem
from numba import njit, types

import numbsparse as ns
from numbsparse import ops
from numbsparse.kernels import cores
from numbsparse.kernels.at_address import address_of, call_of
from numbsparse.kernels.conv import rung
from numbsparse.kernels.conv.k0_cpu import lines as conv_lines
from numbsparse.kernels.conv.k0_cpu import unfolded
from numbsparse.kernels.lstm import cpu_steps
from numbsparse.kernels.matmul.k0_cpu import lines

# Their packages have functions of that name.
conv_weight_grad = import_module("numbsparse.kernels.conv.k0_cpu.weight_grad")
blocks = import_module("numbsparse.kernels.matmul.k0_cpu.weight_grad")
SOON = 0.1  # seconds; whoever runs over a barrier is done in a hundredth


class Late(Exception):
    """The phase was held, and nothing after it began."""


def hold(phase):
    """In the place of `on_cores`: core 1 has taken its first share of a phase, and is not done."""

    def on_cores(function, args, *, phases, work, multiply_adds):
        progress, held = np.zeros((phases, 2 + 1), np.int64), 1
        progress[phase, 1 + 1] += held
        run = Thread(target=function, args=(0, progress, held, *args))
        run.start()
        run.join(SOON)
        waits, later = run.is_alive(), progress[phase + 1 :].copy()
        progress[phase, cores.DONE] += held  # by now core 0 only reads it
        run.join()
        assert waits
        assert not later.any()
        assert phase + 1 == phases or progress[phase + 1 :].any()
        raise Late

    return on_cores


def product():
    w = ns.nn.init.uniform(ns.Layout(np.ones((3, 3))), 16, seed=0)
    x = np.ones((40, 48), np.float32)
    return lambda: ns.matmul(x, w)


def weight_grad():
    x, dy = np.ones((2, 48, 128), np.float32).swapaxes(1, 2)  # feature-major, so they are packed
    return lambda: ns.sddmm(x.T, dy, ns.Layout(np.ones((3, 3))), block_size=16)


def lstm():
    size, batch = 48, 16
    layout = ns.Layout(np.ones((3, 12)))
    x, h, c = (np.ones((*steps, batch, size), np.float32) for steps in ((3,), (), ()))
    ih, hh = (ns.nn.init.uniform(layout, 16, seed=seed) for seed in range(2))
    return x, ops.LSTMCells(hh, np.zeros(4 * size, np.float32), ih), h, c


def lstm_forward():
    operands = lstm()
    return lambda: ops.lstm(*operands)


def lstm_backward():
    x, cells, h, c = lstm()
    trace = ops.lstm(x, cells, h, c)
    return lambda: ops.lstm_grad(trace, cells, x, h, c)


def conv(product):
    problem = ConvProblem(ConvCase(2, (4, 5), 16, 16, 16, (3, 3), padding=1, density=1))
    w, image = problem.w, (2, 20, 16)
    operands = problem.x.reshape(image), w.values
    if product == "weight_grad":
        operands = problem.x.reshape(image), problem.dy.reshape(image)
    out = np.empty(w.values.shape if product == "weight_grad" else image, np.float32)
    compute = getattr(rung("k0_cpu"), product)
    return lambda: compute(*operands, w.layout.index, problem.case.window, out, "highest")


PHASES = {  # of each: the module that starts it, what prepares it, its phases before the last
    "product": (lines, product, {0: "packed"}),
    "weight_grad": (blocks, weight_grad, {1: "x packed", 2: "dy packed", 3: "added"}),
    "lstm": (cpu_steps, lstm_forward, {1: "packed", 2: "multiplied", 3: "gates"}),
    "lstm_grad": (cpu_steps, lstm_backward, {1: "packed", 2: "multiplied", 3: "gates"}),
    "conv": (conv_lines, lambda: conv("forward"), {0: "packed"}),
    "conv weight_grad": (
        conv_weight_grad,
        lambda: conv("weight_grad"),
        {1: "x packed", 2: "dy packed", 3: "added"},
    ),
}
HELD = [
    pytest.param(module, prepare, phase, id=f"{name}, {what}")
    for name, (module, prepare, phases) in PHASES.items()
    for phase, what in phases.items()
]


@pytest.mark.parametrize(("module", "prepare", "phase"), HELD)
def test_a_phase_waits_for_the_one_before(module, prepare, phase, monkeypatch):
    call = prepare()
    monkeypatch.setattr(lines, "pays", lambda *of: False)  # few rows have one phase
    monkeypatch.setattr(unfolded, "FEW", 0)  # few outputs are a product's
    monkeypatch.setattr(blocks, "_slab", lambda features, nbytes: 64)  # the batch in two
    monkeypatch.setattr(conv_weight_grad, "SLAB", 1)  # the images, too
    monkeypatch.setattr(module, "on_cores", hold(phase))
    with pytest.raises(Late):
        call()


def test_slabs_of_a_convolution_are_added_up(monkeypatch):
    """One image a slab: the weights' gradients are those of all of them."""
    problem = ConvProblem(ConvCase(3, (4, 5), 20, 18, 16, (3, 3), padding=1))
    w, out = problem.w, np.full(problem.w.values.shape, np.nan, np.float32)
    x, dy = problem.x.reshape(3, 20, 20), problem.dy.reshape(3, 20, 18)
    monkeypatch.setattr(conv_weight_grad, "SLAB", 1)
    rung("k0_cpu").weight_grad(x, dy, w.layout.index, problem.case.window, out, "highest")
    bound = problem.bound("weight_grad", "float32")
    assert (abs(out - problem.exact("weight_grad")) <= bound).all()


@pytest.mark.parametrize("several", [False, True], ids=["one core", "several"])
@pytest.mark.parametrize(("size", "dtype"), [(4, np.float32), (8, np.float64), (32, np.float32)])
def test_rows_that_are_read_where_they_are_give_the_same_bits(
    rng, monkeypatch, several, size, dtype
):
    """As rows that are packed, whatever is between them and wherever features end."""
    monkeypatch.setattr(blocks, "cores_for", lambda multiply_adds: 1 + several)
    monkeypatch.setattr(cores, "cores_for", lambda multiply_adds: 1 + several)
    for batch in (0, 1, 2, *rng.integers(3, 90, 5)):
        grid, density, gap = rng.integers(1, 6, 2), rng.random(), rng.integers(4)
        layout = ns.Layout(ns.patterns.random(*map(int, grid), density, seed=rng))
        ends = grid * size - rng.integers(0, size, 2)
        x, dy = (rng.standard_normal((batch, n + gap)).astype(dtype)[:, gap:] for n in ends)
        got, packed = (
            ns.sddmm(a.T, b, layout, block_size=size).values
            for a, b in ((x, dy), map(np.asfortranarray, (x, dy)))
        )
        assert np.array_equal(got, packed), (batch, grid, ends, gap)


@pytest.mark.parametrize("size", [4, 32])
def test_slabs_of_a_product_are_added_up(rng, monkeypatch, size):
    """Also the last one, which is shorter, and panels that end beyond the features."""
    monkeypatch.setattr(blocks, "_slab", lambda features, nbytes: 48)
    layout = ns.Layout(ns.patterns.random(6, 5, 0.5, seed=0))
    x = rng.standard_normal((101, 6 * size - 3)).astype(np.float32)
    dy = rng.standard_normal((101, 5 * size - 1)).astype(np.float32)
    exact = x.T.astype(np.float64) @ dy.astype(np.float64)
    kept = ns.BlockSparse.from_dense(exact, layout, block_size=size).toarray()
    for some in (x, np.asfortranarray(x)):
        dw = ns.sddmm(some.T, dy, layout, block_size=size)
        np.testing.assert_allclose(dw.toarray(), kept, rtol=0, atol=1e-4)


def test_where_no_thread_starts_the_caller_does_all(monkeypatch):
    """As in Python 3.12 while it ends."""

    def refused(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    x = np.ones((512, 512), np.float32)
    w, lstm = (
        ns.nn.init.uniform(np.ones((16, 16)), 32, seed=0),
        ns.nn.LSTM(512, 512, block_size=32, seed=0),
    )
    steps = x[:256].reshape(16, 16, 512)
    right = x @ w, ns.sddmm(x.T, x, w.layout).data, lstm(steps)[0].numpy()
    monkeypatch.setattr(Thread, "start", refused)
    cores._helper.cache_clear()
    for _ in range(cores.WAITING + 1):
        got = x @ w, ns.sddmm(x.T, x, w.layout).data, lstm(steps)[0].numpy()
        for ours, expected in zip(got, right, strict=True):
            np.testing.assert_array_equal(ours, expected)
    cores._helper.cache_clear()


def test_a_function_is_called_at_its_address():
    """Of two of one signature the one that is there; what it raises arrives."""
    signature = types.int64(types.float64[:], types.int64)

    def made(factor):
        @cores.compiled(signature)
        def kernel(x, n):
            if n < 0:
                raise ValueError("n is below 0")
            return np.int64(x[0]) * factor + n

        return kernel

    kernels = [made(factor) for factor in (2, 3)]
    call = call_of(signature)

    @njit
    def caller(address, x, n):
        return call(address, (x, n))

    x = np.array([5.0, 7.0])
    assert [caller(address_of(kernel), x[1:], 1) for kernel in kernels] == [15, 22]
    with pytest.raises(ValueError, match="n is below 0"):
        caller(address_of(kernels[0]), x, -1)


WITHOUT_COMPILER = """
import numpy as np, numbsparse as ns
rng = np.random.default_rng(int({seed}))
for size in (4, 8, 16, 32, 64, 128):
    pattern = rng.random(rng.integers(1, 5, 2)) < 0.5
    pattern[0, 0] = True
    batch = int(rng.choice([1, 2, 9, 70]))
    dtype = str(rng.choice(["float32", "float64", "float16"]))
    values = np.ones((int(pattern.sum()), size, size), dtype)
    w, x = ns.BlockSparse(values, pattern), np.ones((batch, pattern.shape[0] * size), dtype)
    y, images = np.ones((batch, w.shape[1]), dtype), x.reshape(batch, 1, -1)
    calls = [lambda: x @ w, lambda: y @ w.T, lambda: ns.sddmm(x.T, y, w)]
    calls += [lambda: ns.conv(images, w, kernel_size=1, padding=1)]
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as error:
            assert "unset it" in str(error), error
        else:
            raise AssertionError(("ran", size, batch, dtype, number))
assert ns.nn.functional.relu(ns.Tensor(x)).shape == x.shape
"""


def test_without_numbas_compiler_products_say_what_to_do():
    """What a debugger of Numba's functions sets; what has no kernel of this kind still runs."""
    program, environment = WITHOUT_COMPILER.format(seed=7), os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
