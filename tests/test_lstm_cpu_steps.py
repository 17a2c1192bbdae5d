"""All steps of an LSTM in one run of the CPU's cores: bit for bit what they are one by one."""

from importlib import import_module
from threading import Timer

import numpy as np
import pytest
from numba import types

import numbsparse as ns
from numbsparse import ops
from numbsparse.kernels import cores
from numbsparse.kernels.lstm import cpu_steps
from numbsparse.kernels.simd import lanes

STEPS = 4
lstm_ops = import_module("numbsparse.ops.lstm")


def operands(units, block_size, batch, dtype, dropout, rng):
    blocks = -(-units // block_size)
    pattern = np.repeat((rng.random((blocks, blocks)) < 0.6) | np.eye(blocks, dtype=bool), 4, 1)
    columns = 4 * blocks * block_size

    def weight(pattern, rows):
        values = 0.2 * rng.standard_normal((int(pattern.sum()), block_size, block_size))
        return ns.BlockSparse(values.astype(dtype), ns.Layout(pattern), shape=(rows, columns))

    x = rng.standard_normal((STEPS, batch, block_size)).astype(dtype)
    weights = weight(np.ones((1, 4 * blocks), bool), block_size), weight(pattern, units)
    bias = rng.standard_normal(columns).astype(dtype)
    h, c = rng.standard_normal((2, batch, units)).astype(dtype)
    kept = 2 * (rng.random((STEPS, batch, units)) < 0.5).astype(dtype) if dropout else None
    return (x, *weights, bias, h, c), kept


@pytest.mark.parametrize(
    ("units", "block_size", "batch", "dtype", "dropout"),
    [
        (64, 16, 9, "float32", True),
        (100, 16, 40, "float32", True),
        (50, 8, 16, "float64", False),
        (13, 4, 5, "float64", True),
        (96, 32, 48, "float32", False),
    ],
)
@pytest.mark.parametrize("n_cores", [1, 3])
def test_steps_at_once(units, block_size, batch, dtype, dropout, n_cores, monkeypatch):
    inputs, kept = operands(units, block_size, batch, dtype, dropout, np.random.default_rng(0))
    dy = np.random.default_rng(1).standard_normal((STEPS, batch, units)).astype(dtype)
    x, weight_ih, weight_hh, bias, h, c = inputs
    cells = ops.LSTMCells(weight_hh, bias, weight_ih, kept=kept)
    assert cpu_steps.serves(weight_hh.values, batch, units)

    def results():
        trace = ops.lstm(x, cells, h, c)
        gates = trace.gates.copy()
        grads = ops.lstm_grad(trace, cells, dy, dy[0], dy[1])
        return gates, trace.h, trace.c, *grads[:4]

    def apart():
        trace = ops.lstm(x, cells, h, c)
        gates = trace.gates.copy()
        grads = ops.lstm_grad(trace, cells, dy, dy[0], dy[1], in_place=False)
        np.testing.assert_array_equal(trace.gates, gates)
        return gates, trace.h, trace.c, *grads[:4]

    monkeypatch.setattr(cores, "cores_for", lambda multiply_adds: n_cores)
    at_once, anew = results(), apart()
    for one, other in zip(at_once, anew, strict=True):
        np.testing.assert_array_equal(one, other)
    monkeypatch.setattr(lstm_ops, "streamed", lambda *_: None)
    for one, other in zip(at_once, results(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_not_served():
    weight = np.zeros((1, 32, 32), np.float32)
    for batch in (0, 1, lanes(types.float32) // 2, 1 << 15):
        assert not cpu_steps.serves(weight, batch, 32)
    assert not cpu_steps.serves(weight.astype(np.float16), 32, 32)


def test_cores_that_keep_core_0_waiting_leave():
    counts, parted = np.zeros(3, np.int64), np.zeros(3, np.int64)
    assert cores.wait_or_part(0, counts, 0, parted)
    assert cores.wait_or_part(1, counts, 0, parted)

    def finish():
        counts[cores.DONE] = 1

    Timer(0.2, finish).start()
    assert cores.wait_or_part(0, counts, 1, parted)
    assert parted.any()
    assert not cores.wait_or_part(1, counts, 1, parted)
