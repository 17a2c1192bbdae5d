"""Bad arguments are refused when a layer or an optimizer is made, and by their names."""

import re

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import nn
from numbsparse.nn import optim, utils

P = [nn.Parameter(np.ones(3, np.float32))]
NAN, BAD = float("nan"), (None, "a", [], {}, object(), 1j)
NUMBER = (*BAD, NAN, -1.0, True)
SIZE = (*BAD, 0, -1, 1.5, True)
DTYPE = (None, -1, "float33", object())
PAIR = (3, (1,), (1, 2, 3), object())


def linear():
    return nn.Linear(8, 8, block_size=4, seed=0)


CALLS = {  # a call that is right, and what is wrong for some of its arguments
    "Linear": (nn.Linear, {"in_features": 8, "out_features": 8}, {
        "in_features": SIZE, "out_features": SIZE, "block_size": SIZE, "dtype": DTYPE}),
    "Conv1d": (nn.Conv1d, {"in_channels": 8, "out_channels": 8, "kernel_size": 3}, {
        "in_channels": SIZE, "out_channels": SIZE, "dtype": DTYPE}),
    "LSTM": (nn.LSTM, {"input_size": 8, "hidden_size": 8}, {
        "input_size": SIZE, "hidden_size": SIZE, "num_layers": SIZE,
        "forget_bias": (*BAD, NAN, True), "update_dropout": NUMBER, "dtype": DTYPE}),
    "MultiplicativeLSTM": (nn.MultiplicativeLSTM, {"input_size": 8, "hidden_size": 8}, {
        "input_size": SIZE, "hidden_size": SIZE, "forget_bias": (*BAD, NAN, True),
        "internal_steps": (*SIZE, 1), "dropout": NUMBER, "eps": NUMBER, "dtype": DTYPE}),
    "Embedding": (nn.Embedding, {"num_embeddings": 4, "embedding_dim": 4}, {
        "num_embeddings": SIZE, "embedding_dim": SIZE, "dtype": DTYPE}),
    "LayerNorm": (nn.LayerNorm, {"features": 4}, {
        "features": SIZE, "eps": NUMBER, "dtype": DTYPE}),
    "layer_norm": (nn.functional.layer_norm, {"x": np.ones((2, 3))}, {"eps": NUMBER}),
    "Dropout": (nn.Dropout, {}, {"p": (*NUMBER, 1.0), "seed": (*BAD[1:], -1, 0.5, True, 2**63)}),
    "dropout": (nn.functional.dropout, {"x": np.ones(3), "rate": 0.5, "seed": 0}, {
        "rate": (*NUMBER, 1.0)}),
    "LossScaler": (optim.LossScaler, {}, {"scale": NUMBER, "interval": SIZE[1:]}),
    "ExponentialMovingAverage": (optim.ExponentialMovingAverage, {"parameters": P}, {
        "parameters": (P[0], [1]), "decay": (*NUMBER, 1.0)}),
    "SGD": (optim.SGD, {"parameters": P, "lr": 0.1}, {
        "parameters": (None, 3, P[0]), "lr": NUMBER, "momentum": (*NUMBER, 1.0),
        "weight_decay": NUMBER}),
    "Adam": (optim.Adam, {"parameters": P}, {
        "lr": NUMBER, "eps": NUMBER, "weight_decay": NUMBER,
        "betas": (*PAIR, (0.9, None), (0.9, 1.0), (NAN, 0.9))}),
    "clip_grad_norm": (utils.clip_grad_norm, {"parameters": P, "max_norm": 1.0}, {
        "max_norm": (*NUMBER, 0)}),
    "prune": (utils.prune, {"model": linear(), "density": 1.0}, {"remap": (None, 3, "a")}),
    "BlockSparse": (ns.BlockSparse, {"data": np.ones((1, 4, 4)), "layout": [[1]]}, {
        "shape": (*PAIR, "ab", (4, None))}),
    "from_arrays": (
        ns.Layout.from_arrays, {"indptr": [0, 1], "indices": [0], "shape": (1, 1)},
        {"shape": (*PAIR, None, "ab", (1, 0))}),
    "linear": (nn.functional.linear, {"x": np.ones((1, 8), np.float32), "weight": linear().weight},
        {"x": (None, 1.0), "weight": (None, "a", np.ones((8, 8)))}),
    "astype": (linear().weight.data.astype, {"dtype": "float64"}, {"dtype": DTYPE}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_named(name):
    call, right, wrong = CALLS[name]
    call(**right)
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises((TypeError, ValueError)) as refused:
                call(**right | {argument: value})
            assert re.search(rf"\b{argument}\b.* takes? ", str(refused.value)), (argument, value)


def test_a_model_of_any_seed_resumes():
    for seed in (0, 2**63 - 1):
        nn.Dropout(seed=1).load_state_dict(nn.Dropout(seed=seed).state_dict())
