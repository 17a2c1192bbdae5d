"""The benchmark's section of the LSTM: what it checks, and how it shows a row."""

import numpy as np
import pytest

from numbsparse import device
from numbsparse.bench import lstm, results
from numbsparse.bench.measure import Options
from numbsparse.bench.sections import SECTIONS, heading


@pytest.fixture(scope="module")
def sequence():
    if not device.is_available():
        pytest.skip("takes a GPU or the simulator")
    return lstm.Sequence(64, "float16", "highest", 2, 3, lstm.small_world(64))


def test_the_exact_outputs_are_those_of_the_weights(sequence):
    """In the first step nothing is before; gates lie block by block."""
    w, bias = sequence.weights["weight_ih"].toarray(), sequence.weights["bias"]
    z = sequence.x.numpy()[0].astype(float) @ w.astype(float) + bias.astype(float)
    i, _, g, o = (z.reshape(3, -1, 4, lstm.B)[:, :, gate] for gate in range(4))
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    y, gradient = sequence.exact()
    h = sigmoid(o) * np.tanh(sigmoid(i) * np.tanh(g))
    np.testing.assert_allclose(y[0], h.reshape(3, 64), atol=1e-6)
    assert y.dtype == np.float32
    assert w.dtype == bias.dtype == sequence.lstm.layers[0].weight_hh.data.dtype == np.float16
    assert gradient.shape == (len(sequence.blocks), lstm.B, lstm.B)


@pytest.mark.parametrize("name", ["weight_ih", "weight_hh"])
def test_peers_have_all_units_of_a_gate_together(sequence, name):
    w = sequence.weights[name]
    found, places = lstm.gate_major(w)
    wide = w.toarray().reshape(-1, 2, 4, lstm.B).swapaxes(1, 2)  # (features, gate, block, B)
    np.testing.assert_array_equal(found.toarray(), wide.reshape(w.shape))
    np.testing.assert_array_equal(found.values[places], w.values)
    bias = lstm.bias_by_gate(sequence).reshape(4, 2, lstm.B)
    np.testing.assert_array_equal(bias.swapaxes(0, 1).ravel(), sequence.weights["bias"].ravel())


def test_what_is_wrong_is_not_timed(sequence):
    y, gradient = sequence.exact()

    def trainer(y, gradient):
        return lambda _: lstm.Trainer(lambda: None, lambda: y, lambda: gradient, lambda: 7)

    def missing(sequence):
        raise ImportError("no torch")

    one_unit = y.copy()
    one_unit[1, 2, 3] = 1
    makers = {
        "right": trainer(y.astype(np.float16), gradient),
        "output": trainer(one_unit, gradient),
        "gradient": trainer(y, 1.1 * gradient),
        "nan": trainer(y, np.nan * gradient),
        "missing": missing,
    }
    row = lstm._measured(sequence, makers, Options(quick=True))
    assert 0 < row["errors"]["right"] < 1e-3
    assert row["errors"]["gradient"] == pytest.approx(0.1)
    assert row["seconds"].keys() == row["bytes"].keys() == {"right"}
    wrong = {name: why[:21] for name, why in row["not_timed"].items()}
    assert wrong.pop("missing") == "failed: ImportError: "
    assert wrong == dict.fromkeys(("output", "gradient", "nan"), "wrong: relative error")
    assert (row["hidden"], row["steps"]) == (64, 2)


def test_a_row_names_times_memory_and_what_failed():
    row = {
        "hidden": 18432,
        "steps": 64,
        "batch": 64,
        "dtype": "float16",
        "precision": "highest",
        "density": 0.0327,
        "seconds": {"numbsparse": 0.01, "cuDNN dense": 0.1},
        "bytes": {"numbsparse": 2**31, "cuDNN dense": 2**33},
        "not_timed": {"torch BSR": "ImportError: no torch"},
    }
    line = results.line(row, [row])
    assert "numbsparse 10 ms 2.00 GiB" in line
    assert "cuDNN dense 100 ms 8.00 GiB (0.10x)" in line
    assert "torch BSR ImportError" in line
    assert "lstm" in SECTIONS
    assert heading("lstm").startswith("LSTMs, forward and backward")
