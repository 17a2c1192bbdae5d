"""The benchmark's section of the LSTM: what it checks, and how it shows a row."""

from types import SimpleNamespace

import numpy as np

import numbsparse as ns
from numbsparse import nn
from numbsparse.bench import lstm, show
from numbsparse.bench.sections import SECTIONS


def test_the_check_finds_a_wrong_unit(rng):
    module = nn.LSTM(64, 64, layout=[[1, 1], [0, 1]], seed=0)
    x = ns.Tensor(rng.standard_normal((2, 3, 64), dtype=np.float32))
    weights = {name: getattr(module.layers[0], name).data for name in lstm.WEIGHTS}
    sequence = SimpleNamespace(weights=weights, x=x, columns=np.array([0, 1]))
    y = module(x)[0].data.astype(float)
    assert lstm._relative(*lstm._some_units(sequence, y)) < 1e-6
    y[0, 1, 3] += 0.1  # the step after it is checked with it
    got, expected = lstm._some_units(sequence, y)
    assert (abs(got - expected) > 1e-4).any(axis=(0, 2, 3)).all()


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
        "step": {"recurrent step": 3e-5},
    }
    line = show.line("lstm", row, [row])
    assert "numbsparse 10 ms 2.00 GiB" in line
    assert "cuDNN dense 100 ms 8.00 GiB (10.0x, 4.0x)" in line
    assert "torch BSR ImportError" in line
    assert "recurrent step 30 us" in line
    assert "lstm" in SECTIONS
    assert "lstm" in show.HEADINGS


def test_gates_lie_block_by_block(rng):
    layer = nn.LSTM(4, 8, block_size=4, seed=0).layers[0]
    x = rng.standard_normal((3, 8))
    z = (x @ layer.weight_hh.data.toarray().astype(float)).reshape(3, 2, 4, 4)
    for column in range(2):
        found = lstm._columns(layer.weight_hh.data, x, column, 4)
        np.testing.assert_allclose(found, z[:, column], atol=1e-12)
