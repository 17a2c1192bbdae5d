"""Layers split over real processes are the whole ones, within rounding, as they train too."""

import numpy as np
import pytest
import split_programs as programs
from distributed_helpers import in_turn, run, values

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import device, nn
from numbsparse.nn import functional as F


@pytest.fixture(scope="module")
def pair():
    """What two ranks did, one check after the other."""
    on_gpu = (programs.trained, True, "float32", "cuda", 1, "cuda", False)
    simulated = {"collectives": (*on_gpu, False), "peers' memory": (*on_gpu, True)}
    return in_turn(
        {
            "trained": (programs.trained, True, "float64"),
            **(simulated if device.SIMULATED else {}),
            "twice": (programs.twice_differentiated,),
            **{what: (programs.refused, what) for what in REFUSED},
        }
    )


def of(ranks, name):
    return values([results[name] for results in ranks])


def test_split_layers_train_as_whole_ones(pair):
    alone = programs.trained(False, "float64")
    for got in (*of(pair, "trained"), *values(run(programs.trained, True, "float64", size=3))):
        for one, other in zip(got, alone, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_layers_are_split_beside_data_parallel():
    """Two pairs of ranks: each pair splits the layers, and takes its part of the batch."""
    losses, *_, weights = programs.trained(False, "float64")
    how = True, "float64", "cpu", 3, "cpu", True
    for own, *_, found in values(run(programs.trained, *how, size=4)):
        np.testing.assert_allclose(own, losses, rtol=1e-9, atol=1e-12)
        for a, b in zip(found, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not device.SIMULATED, reason="on a GPU each rank takes its own")
def test_on_a_gpu(pair):
    alone = programs.trained(False, "float32", steps=1, size="cuda")
    for got in (*of(pair, "collectives"), *of(pair, "peers' memory")):
        for one, other in zip(got, alone, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_of_one_process_a_split_layer_is_the_whole_one():
    whole, split = programs.trained(False, "float64"), programs.trained(True, "float64")
    for one, other in zip(whole, split, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_what_is_frozen_stays_so():
    how = {"block_size": 4, "dtype": "float64"}
    linear, lstm = nn.Linear(8, 8, **how), nn.LSTM(8, 8, **how)
    frozen = [linear.weight, lstm.layers[0].weight_hh, lstm.layers[0].bias]
    for parameter in frozen:
        parameter.requires_grad = False
    column, row, split = dist.ColumnLinear(linear), dist.RowLinear(linear), dist.SplitLSTM(lstm)
    for layer in (column, row):
        assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
    of_lstm = split.weight_ih_l0, split.weight_hh_l0, *split.biases
    assert [parameter.requires_grad for parameter in of_lstm] == [True, False, False]


def test_gradients_of_gradients(pair):
    model = programs.Model("float64", False)
    x = ns.Tensor(np.linspace(-1, 1, 48).reshape(2, 24), requires_grad=True)
    y = model.down(F.tanh(model.up(x)))
    (dx,) = ns.grad((y * y).sum(), [x], create_graph=True)
    (ddx,) = ns.grad((dx * dx).sum(), [x])
    for got, said in of(pair, "twice"):
        np.testing.assert_allclose(got, ddx.numpy(), rtol=1e-9, atol=1e-12)
        assert "cannot be differentiated again" in said


REFUSED = {
    "columns": "ValueError: out_features takes a multiple of 2 ranks x 4 features along",
    "rows": "ValueError: in_features takes a multiple of 2 ranks x 4 features along the axis",
    "gate": "TypeError: linear takes an nn.Linear without gate",
    "units": "ValueError: hidden_size takes a multiple of 8, got 12",
    "peers": "ValueError: peer_memory takes GPUs of one host and the backend nccl, got 2 ranks",
    "norm": "TypeError: lstm takes an nn.LSTM without layer_norm",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_split_is_refused(what, pair):
    for said in of(pair, what):
        assert said.startswith(REFUSED[what])
