"""Bad arguments are refused when a layer or an optimizer is made, and by their names."""

import copy
import inspect
import re
from zlib import crc32

import numpy as np
import pytest
from arguments_helpers import ODD, what_is_said
from drawn import DRAWS
from drawn import SEED as DRAWN

import numbsparse as ns
from numbsparse import nn
from numbsparse.kernels.matmul import rung
from numbsparse.nn import optim, utils
from numbsparse.simulator.accesses import Recording
from numbsparse.testing import Case, check_rung, record

F = nn.functional
P = [nn.Parameter(np.ones(3, np.float32))]
NAN, BAD = float("nan"), (None, "a", [], {}, object(), 1j)
NUMBER = (*BAD, NAN, -1.0, True)
SIZE = (*BAD, 0, -1, 1.5, True)
DTYPE = (None, -1, "float33", "U3", [], object(), type("Odd", (), {"dtype": "f33"})())
WATCHED = ns.Tensor(np.ones(2), requires_grad=True)
AXIS = ("a", 1.5, [0.5], object(), WATCHED)
PAIR = (3, (1,), (1, 2, 3), object())
SEED = (-1, 1.5, "a", {}, object())
X = np.ones((2, 8), np.float32)
W = ns.BlockSparse(np.ones((2, 4, 4), np.float32), [[1, 0], [0, 1]])
MASKED = np.ma.masked_array(X, X > 0)
WORDS = (None, "a", {}, object(), np.array(["a"]), np.array([None]), MASKED, [[1.0], [2.0, 3.0]])
NO_FLOATS = (*WORDS, 3, True, X.astype(int), X.astype(complex), X.astype(">f4"))
NO_MATRIX = (*NO_FLOATS, X, 1.5)


RAGGED, NO_PATH = [[1], [2, 3]], (1j, object(), {"a": 1})
SQUARE_OF = ns.Tensor(X, requires_grad=True)
SQUARE = SQUARE_OF * SQUARE_OF
ONES = np.ones(8, np.float32)
FLAG = (None, "a", [], 2, 0.5, X, ns.Tensor(X))
WORD = (None, 3, [], {}, X, object(), "k9", b"auto")
NO_DTYPE = ("int32", complex, bool, ">f4")
PRUNING = {"density": 0.5, "stop": 4}
STEPPED = [optim.SGD([nn.Parameter(ONES)], 0.1)]
STEPPED[0].parameters[0].grad = ns.Tensor(ONES)


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
        "parameters": (None, 3, P[0], np.array(3)), "lr": NUMBER, "momentum": (*NUMBER, 1.0),
        "weight_decay": NUMBER}),
    "Adam": (optim.Adam, {"parameters": P}, {
        "lr": NUMBER, "eps": NUMBER, "weight_decay": NUMBER,
        "betas": (*PAIR, (0.9, None), (0.9, 1.0), (NAN, 0.9))}),
    "clip_grad_norm": (utils.clip_grad_norm, {"parameters": P, "max_norm": 1.0}, {
        "max_norm": (*NUMBER, 0)}),
    "prune": (utils.prune, {"model": linear(), "density": 1.0}, {
        "remap": (None, 3, "a"), "model": (*BAD, P[0], 3), "scope": BAD}),
    "threshold": (utils.prune, {"model": linear(), "threshold": 0.0}, {"scope": BAD}),
    "requires_grad_": (linear().requires_grad_, {"requires_grad": True}, {"requires_grad": FLAG}),
    "persistent": (lambda persistent: linear().register_buffer("a", X, persistent),
        {"persistent": True}, {"persistent": FLAG}),
    "BlockSparse": (ns.BlockSparse, {"data": np.ones((1, 4, 4)), "layout": [[1]]}, {
        "shape": (*PAIR, "ab", (4, None))}),
    "from_arrays": (
        ns.Layout.from_arrays, {"indptr": [0, 1], "indices": [0], "shape": (1, 1)},
        {"shape": (*PAIR, None, "ab", (1, 0))}),
    "linear": (nn.functional.linear, {"x": np.ones((1, 8), np.float32), "weight": linear().weight},
        {"x": (None, 1.0), "weight": (None, "a", np.ones((8, 8)))}),
    **{name: (getattr(F, name), {"x": X}, {"x": NO_FLOATS}) for name in (
        "abs", "concat_elu", "elu", "gelu", "glu", "log_softmax", "logsumexp", "relu", "sigmoid",
        "softmax", "softplus", "tanh")},
    **{name: (getattr(F, name), {"a": X}, {"a": NO_FLOATS}) for name in (
        "exp", "expm1", "log", "negative", "sqrt")},
    "add": (F.add, {"a": X, "b": X}, {"a": WORDS, "b": WORDS}),
    "divide": (F.divide, {"a": X, "b": X}, {"a": WORDS, "b": WORDS}),
    "concatenate": (F.concatenate, {"tensors": [X]}, {"tensors": [[X, word] for word in WORDS]}),
    "reshape": (F.reshape, {"x": X, "shape": 16}, {
        "x": (*WORDS, W), "shape": (None, 1.5, "a", [2.0])}),
    "broadcast_to": (F.broadcast_to, {"x": X, "shape": (2, 8)}, {"shape": (None, (2, 8.0))}),
    "dropout x": (F.dropout, {"x": X, "rate": 0.5, "seed": 0}, {"x": NO_FLOATS}),
    "embedding": (F.embedding, {"table": X, "indices": [0, 1]}, {
        "table": NO_FLOATS, "indices": (*WORDS, X)}),
    "cross_entropy": (F.cross_entropy, {"logits": X, "targets": [0, 1]}, {
        "logits": NO_FLOATS[:8], "targets": (*WORDS, X)}),
    "no logits": (F.cross_entropy, {"logits": X[:1], "targets": [0]}, {
        "logits": (X[:1, :0],)}),
    "no rows": (lambda logits: F.cross_entropy(logits, np.zeros(len(logits), int)),
        {"logits": X}, {"logits": (X[:0],)}),
    "no predictions": (lambda prediction: F.mse_loss(prediction, prediction), {"prediction": X}, {
        "prediction": (X[:0], X[:, :0])}),
    "mean": (F.mean, {"x": X}, {"x": (X[:0], *NO_FLOATS), "axis": AXIS}),
    "sum": (F.sum, {"x": X}, {"x": NO_FLOATS, "axis": AXIS}),
    "unbind": (F.unbind, {"x": X}, {"axis": (None, *AXIS)}),
    "split": (F.split, {"x": X, "sections": 2}, {"axis": (None, *AXIS)}),
    "stack": (F.stack, {"tensors": [X, X]}, {"tensors": (None, 3), "axis": (None, *AXIS)}),
    "transpose": (F.transpose, {"x": X}, {"axes": AXIS}),
    "gelu": (F.gelu, {"x": X}, {"approximate": (*BAD, np.ones(3))}),
    "matmul": (ns.matmul, {"x": X, "w": W}, {"precision": (*BAD[1:], np.ones(3))}),
    "pattern": (ns.draw, {"pattern": [[1]]}, {"pattern": (*WORDS, WATCHED)}),
    "kernel_size": (
        lambda **sizes: ns.conv(X[None], W, **({"kernel_size": 1} | sizes)), {},
        {name: (*BAD, np.array(3), 1.5, True) for name in (
            "kernel_size", "stride", "padding", "dilation")}),
    "NormalizedProduct": (nn.NormalizedProduct, {"weight": W}, {
        "features": SIZE[1:], "groups": SIZE, "eps": NUMBER, "precision": BAD[1:]}),
    "check_grads": (lambda inputs: ns.testing.check_grads(F.tanh, inputs), {"inputs": np.ones(2)}, {
        "inputs": (*BAD, X, ns.Tensor(np.ones(2)))}),
    "repeated_product": (F.repeated_product, {"w": W}, {"w": NO_MATRIX, "calls": SIZE}),
    "repeated_norm": (F.repeated_norm, {"gain": ONES, "bias": ONES}, {
        "gain": WORDS, "bias": WORDS, "calls": SIZE}),
    "repeated_cell": (F.repeated_cell, {}, {"calls": SIZE}),
    "cell": (lambda z, c: F.repeated_cell()(z, c), {"z": np.ones((1, 4, 8)), "c": np.ones((1, 8))},
        {"z": WORDS, "c": WORDS}),
    "out_features": (ns.conv_transpose, {"x": X[None], "w": W, "kernel_size": 1}, {
        "out_features": (*BAD[1:], *SIZE[1:])}),
    "absent_norms": (nn.utils.absent_norms,
        {"x": X, "dy": X, "layout": W.layout, "block_size": 4},
        {"x": (X[0], 3.0), "dy": (X[0], 3.0), "block_size": SIZE, "by": BAD}),
    "features": (F.layer_norm, {"x": X, "gain": np.ones(8, np.float32)}, {
        "gain": (1.0, [1.0], X), "bias": (2, [1.0, 2.0])}),
    **{f"{layer.__name__} x": (layer(8), {"x": X}, {
        "x": (1.0, [1.0, 2.0], X[:, :4], *NO_FLOATS, X.astype(float))})
        for layer in (nn.LayerNorm, nn.BatchNorm)},
    "remap": (F.remap, {"w": W, "layout": W.layout}, {"w": NO_MATRIX}),
    "remap of a matrix": (W.remap, {"layout": W.layout}, {"fresh": (3, "a", X, W.layout, [])}),
    "diagonal": (W.diagonal, {"k": 1}, {"k": (None, 1.5, True, "a", 2**70, -(2**70), X)}),
    "moved": (W.to, {"place": "cpu"}, {"place": (None, 3, X, X[:0], "gpu", "cuda:x")}),
    "block_norms": (F.block_norms, {"w": W}, {"w": NO_MATRIX, "by": BAD}),
    "column_norms": (F.column_norms, {"w": W}, {"w": NO_MATRIX, "eps": NUMBER}),
    "scale_columns": (F.scale_columns, {"w": W, "scale": np.ones(8, np.float32)}, {
        "w": NO_MATRIX, "scale": WORDS}),
    "normalise_columns": (F.normalise_columns, {"v": W, "g": np.ones(8, np.float32)}, {
        "v": NO_MATRIX, "g": WORDS, "eps": NUMBER}),
    "scale_blocks": (F.scale_blocks, {"w": W, "gate": np.ones(2, np.float32)}, {
        "w": NO_MATRIX, "gate": WORDS}),
    "Tensor": (ns.Tensor, {"data": X}, {"data": WORDS, "requires_grad": FLAG}),
    "find": (W.layout.find, {"block_rows": [0], "block_columns": [1]}, {
        "block_rows": (*WORDS, 0.5), "block_columns": (*WORDS, 0.5, [1.0])}),
    "blocks of one shape": (W.layout.find, {"block_rows": [0, 0], "block_columns": [1, 0]}, {
        "block_rows": ([0, 1, 0],), "block_columns": ([0, 1, 0],)}),
    "index arrays": (
        ns.Layout.from_arrays, {"indptr": [0, 1], "indices": [0], "shape": (1, 1)},
        {"indptr": (RAGGED,), "indices": (RAGGED,)}),
    "sum of a matrix": (W.sum, {}, {"axis": (2, "a", X, True, 0.5, [0])}),
    "place": (ns.to_device, {"host": X}, {"place": (None, X, "a", b"cuda")}),
    "load": (lambda path: path and ns.load(path), {"path": ""}, {"path": NO_PATH}),
    "save": (lambda path: path and ns.save(path, {}), {"path": ""}, {"path": NO_PATH}),
    "grad_output": (
        lambda **how: ns.grad(SQUARE, [SQUARE_OF], **how), {"grad_output": X}, {
            "grad_output": ("a", X[0], X.astype(float), W)}),
    "warmup": (optim.warmup, {"step": 1, "steps": 4}, {"step": NUMBER, "steps": NUMBER}),
    "cosine": (optim.cosine, {"step": 1, "steps": 4}, {
        "step": NUMBER, "steps": NUMBER, "floor": NUMBER}),
    "warmup_cosine": (optim.warmup_cosine, {"step": 3, "steps": 4, "warmup_steps": 2}, {
        "step": NUMBER, "steps": NUMBER, "warmup_steps": NUMBER, "floor": NUMBER}),
    "seeds": (nn.Linear, {"in_features": 8, "out_features": 8}, {"seed": SEED}),
    "seeds of LSTM": (nn.LSTM, {"input_size": 8, "hidden_size": 8}, {
        "seed": SEED, "input_layout": ([[1, 0]], [[2]], 3)}),
    "seeds of mLSTM": (nn.MultiplicativeLSTM, {"input_size": 8, "hidden_size": 8}, {
        "seed": SEED, "input_layout": ([[1, 0]], [[2]], 3)}),
    "seeds of Conv1d": (nn.Conv1d, {"in_channels": 8, "out_channels": 8, "kernel_size": 3}, {
        "seed": SEED}),
    "uniform": (nn.init.uniform, {"layout": W.layout, "block_size": 4}, {
        "seed": SEED, "gain": NUMBER, "shape": (*PAIR, (9, 8), (8, 4), (8.0, 8)),
        "block_size": SIZE}),
    "normal": (nn.init.normal, {"layout": W.layout}, {"seed": SEED, "gain": NUMBER}),
    "identity": (nn.init.identity, {"layout": W.layout}, {"scale": (*BAD, NAN, True)}),
    "orthogonal": (nn.init.orthogonal, {"layout": W.layout}, {
        "seed": SEED, "gain": (*BAD, NAN, True)}),
    "grad": (ns.grad, {"output": F.sum(ns.Tensor(X, requires_grad=True)), "inputs": P}, {
        "output": (*BAD, X), "inputs": (None, 3, P[0], [X])}),
    "add_param_group": (lambda group: optim.SGD(P, 0.1).add_param_group(group), {
        "group": {"params": nn.Parameter(np.ones(3))}}, {"group": (*BAD, {"params": P, "b": 1})}),
    "weight_norm": (nn.utils.weight_norm, {"module": linear()}, {"module": (*BAD, nn.ReLU())}),
    "seeds of Embedding": (nn.Embedding, {"num_embeddings": 4, "embedding_dim": 4}, {
        "seed": SEED}),
    "reduced": (F.sum, {"x": X}, {"axis": (2, (0, 0), [-3]), "keepdims": FLAG}),
    "averaged": (F.mean, {"x": X}, {"axis": (2, (0, 0)), "keepdims": FLAG}),
    "of blocks": (F.sum, {"x": W}, {"axis": (2, (0, 0), X, "a"), "keepdims": FLAG}),
    "unbound": (F.unbind, {"x": X}, {"x": (W,), "axis": (2, (0, 1), ())}),
    "parted": (F.split, {"x": X, "sections": 2}, {"x": (W,), "axis": (2, (0, 1), ())}),
    "joined": (F.concatenate, {"tensors": [X]}, {"tensors": (W, [X, W]), "axis": (2, (0, 1), ())}),
    "order": (F.transpose, {"x": X}, {"axes": (0, 2, (0, 0), (0,))}),
    "as many": (F.reshape, {"x": X, "shape": 16}, {"shape": (15, (-1, 3), (-1, 0), ())}),
    "repeated": (F.broadcast_to, {"x": X, "shape": (2, 8)}, {"x": NO_FLOATS}),
    "log_sigmoid": (F.log_sigmoid, {"x": X}, {"x": NO_FLOATS}),
    "mse_loss": (F.mse_loss, {"prediction": X, "target": X}, {
        "prediction": NO_FLOATS, "target": (*NO_FLOATS[:8], X.astype(float), X.astype("f2"))}),
    "bias": (F.linear, {"x": X, "weight": W}, {
        "bias": (*NO_FLOATS[1:], X, np.ones(8), ONES.astype("f2"))}),
    "numbers of features": (F.layer_norm, {"x": X}, {
        name: (*NO_FLOATS[1:], np.ones(8), ONES.astype("f2")) for name in ("gain", "bias")}),
    "numbers of columns": (F.scale_columns, {"w": W, "scale": ONES}, {
        "scale": (*NO_FLOATS, np.ones(8), ONES.astype("f2")), "tap_features": SIZE[1:]}),
    "fan_in": (nn.init.fan_in, {"w": W}, {"w": NO_MATRIX, "tap_features": SIZE[1:]}),
    "products": (F.multiply, {"a": ns.Tensor(W), "b": 2.0}, {"b": (X, None)}),
    "kernel": (ns.matmul, {"x": X, "w": W}, {"kernel": WORD}),
    "kernel of w @ x": (lambda kernel: ns.matmul(W, X.T, kernel=kernel), {"kernel": "auto"}, {
        "kernel": WORD}),
    "kernel of sddmm": (ns.sddmm, {"a": X.T, "b": X, "layout": W}, {"kernel": WORD}),
    "kernel of conv": (ns.conv, {"x": X[None], "w": W, "kernel_size": 1}, {"kernel": WORD}),
    **{f"dtype of {layer.__name__}": (layer, {"features": 8}, {"dtype": NO_DTYPE})
        for layer in (nn.LayerNorm, nn.BatchNorm)},
    **{f"dtype of {make.__name__}": (make, {"layout": W.layout}, {"dtype": NO_DTYPE})
        for make in (nn.init.uniform, nn.init.identity, nn.init.orthogonal)},
    "flags of Linear": (nn.Linear, {"in_features": 8, "out_features": 8}, {
        "bias": FLAG, "gate": FLAG, "dtype": NO_DTYPE}),
    "flags of Conv1d": (nn.Conv1d, {"in_channels": 8, "out_channels": 8, "kernel_size": 3}, {
        "bias": FLAG, "dtype": NO_DTYPE}),
    "flags of LSTM": (nn.LSTM, {"input_size": 8, "hidden_size": 8}, {
        "layer_norm": FLAG, "update_dropout": (1.0,), "dtype": NO_DTYPE}),
    "flags of mLSTM": (nn.MultiplicativeLSTM, {"input_size": 8, "hidden_size": 8}, {
        "dropout": (1.0,), "dtype": NO_DTYPE}),
    "flags of SGD": (optim.SGD, {"parameters": P, "lr": 0.1, "momentum": 0.5}, {"nesterov": FLAG}),
    "causal": (ns.patterns.causal, {"kernel_size": (3,)}, {"centre": FLAG}),
    **{change.__name__: (change, {"model": linear()} | more, {
        "model": (None, 3, "a", {"a": 1}, P[0], W, ns.Tensor(W)),
        "remap": (3, "a", W, ns.Tensor(W))})
        for change, more in ((utils.Rewiring, {}), (utils.PruneAndGrow, PRUNING),
                             (utils.GradualPruning, PRUNING))},
    "GroupLasso": (utils.GroupLasso, {"model": linear(), "density": 0.5}, {
        "model": (None, 3, "a", P[0], W)}),
    "scaled loss": (optim.LossScaler().scale, {"loss": ns.Tensor(X)}, {
        "loss": (*BAD, X, W, ns.Tensor(W), ns.Tensor(X.astype(int)))}),
    "optimizers": (lambda optimizers: optim.LossScaler().step(*optimizers),
        {"optimizers": STEPPED}, {"optimizers": [[bad] for bad in (*BAD, P, P[0])]}),
    "scaler": (utils.clip_grad_norm, {"parameters": P, "max_norm": 1.0}, {
        "scaler": (*BAD[1:], P[0])}),
    "recompute": (nn.recompute, {"function": F.relu, "x": X}, {"function": (*BAD, X)}),
    "apply": (nn.Linear(4, 4, block_size=4).apply, {"function": repr}, {"function": (*BAD, X)}),
    "ModuleList": (nn.ModuleList, {"modules": [linear()]}, {"modules": (None, 3, P[0], [None], X)}),
    "ModuleDict": (nn.ModuleDict, {"modules": {"a": linear()}}, {
        "modules": (None, 3, P[0], ["a"], [None], {"a": None}, {1: linear()}, X)}),
    "weight of NormalizedProduct": (nn.NormalizedProduct, {"weight": W}, {"weight": NO_MATRIX}),
    "rows of absent_norms": (nn.utils.absent_norms,
        {"x": X, "dy": X, "layout": W.layout, "block_size": 4},
        {"x": (X[:1], X.astype(float)), "dy": (X[:1], X.astype(float)), "block_size": (5,)}),
    "Case": (Case, {"batch": 1, "in_features": 8, "out_features": 8, "block_size": 4}, {
        "batch": (*SIZE[:6], *SIZE[7:]), "in_features": SIZE, "out_features": SIZE,
        "block_size": SIZE, "density": (*NUMBER, 1.5)}),
    "check_rung": (
        lambda **how: check_rung(rung("k0_cpu"), case=Case(1, 8, 8, 4), dtype="float32", **how),
        {"product": "forward", "place": "cpu"},
        {"product": (*WORD, "y"), "place": (*WORD, "gpu"), "precision": WORD}),
    "record": (record, {"call": Recording()}, {"call": BAD}),
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


OTHERS_SAY = {  # what a function says that is given
    ("MultiplicativeLSTM", "layout"), ("seeds of mLSTM", "layout"), ("flags of mLSTM", "layout"),
    ("apply", "function"), ("no rows", "logits"), ("optimizers", "optimizers"),
    ("load", "path"), ("save", "path"), ("dropout", "call"), ("dropout x", "call"),
    ("record", "call"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_taken_or_refused_in_our_words(name):
    """Drawn for each argument; an array is not asked whether it is true."""
    call, right, _ = CALLS[name]
    rng = np.random.default_rng([DRAWN, crc32(name.encode())])
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(call).parameters.items()
    names = {*right, *(n for n, of in parameters if of.kind not in several)}
    for argument in sorted(names):
        if (name, argument) in OTHERS_SAY:
            continue
        for i in rng.permutation(len(ODD))[: 16 * DRAWS]:
            said = what_is_said(call, right | {argument: copy.deepcopy(ODD[i])})
            ours = rf"\b({'|'.join(names)})\b| takes? "
            assert said is None or re.search(ours, said), (argument, ODD[i], said)


def test_a_model_of_any_seed_resumes():
    for seed in (0, 2**63 - 1):
        nn.Dropout(seed=1).load_state_dict(nn.Dropout(seed=seed).state_dict())
