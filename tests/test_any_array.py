"""Functions of nn take arrays of every library, and lists, as Tensors without a gradient."""

import numpy as np
import pytest

import numbsparse as ns
from numbsparse.nn import functional as F

X = np.random.default_rng(0).uniform(0.5, 2, (4, 8))
W = ns.BlockSparse(np.random.default_rng(1).uniform(0.5, 2, (3, 4, 4)), [[1, 0], [1, 1]])
OF_ONE = (
    "abs", "concat_elu", "elu", "exp", "expm1", "gelu", "glu", "log", "log_sigmoid", "log_softmax",
    "logsumexp", "mean", "negative", "relu", "sigmoid", "softmax", "softplus", "sqrt", "sum",
    "tanh", "transpose", "unbind",
)  # fmt: skip
CALLS = {
    **{name: getattr(F, name) for name in OF_ONE},
    "power": lambda x: F.power(x, 3),
    "reshape": lambda x: F.reshape(x, 32),
    "cast": lambda x: F.cast(x, "float32"),
    "dropout": lambda x: F.dropout(x, 0.5, seed=0),
    "layer_norm": lambda x: F.layer_norm(x),
    "embedding": lambda x: F.embedding(x, [1, 0]),
    "linear": lambda x: F.linear(x, W),
    "cross_entropy": lambda x: F.cross_entropy(x, [0, 1, 2, 3]),
    "concatenate": lambda x: F.concatenate([x, x], 1),
    **{
        f"{name}, {side}": lambda x, function=function, other=other: function(*other(x))
        for name, function in (
            ("add", F.add),
            ("subtract", F.subtract),
            ("multiply", F.multiply),
            ("divide", F.divide),
        )
        for side, other in (
            ("both", lambda x: (x, x)),
            ("left", lambda x: (x, 3)),
            ("right", lambda x: (3, x)),
            ("beside", lambda x: (x, ns.Tensor(X))),
        )
    },
    "mse_loss": lambda x: F.mse_loss(ns.Tensor(X) * 2, x),
}


def arrays():
    yield X
    yield X.tolist()
    yield X[::-1, ::-1].copy()[::-1, ::-1]
    yield np.asfortranarray(X)
    yield memoryview(X)
    torch = pytest.importorskip("torch")
    yield torch.tensor(X)


@pytest.mark.parametrize("name", CALLS)
def test_functions_take_any_array(name):
    function = CALLS[name]
    expected = function(ns.Tensor(X))
    parts = expected if isinstance(expected, list) else [expected]
    for x in arrays():
        got = function(x)
        assert all(isinstance(y, ns.Tensor) and not y.requires_grad for y in parts)
        for one, other in zip(got if isinstance(got, list) else [got], parts, strict=True):
            np.testing.assert_allclose(one.data, other.data, rtol=1e-12)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "abs", "relu", "negative"])
def test_functions_take_block_sparse_matrices(name):
    function, count = getattr(F, name), 2 if name in ("add", "subtract", "multiply") else 1
    expected = function(*[W.toarray()] * count).data
    for operands in ([W] * count, [W, ns.Tensor(W)][:count]):
        np.testing.assert_array_equal(function(*operands).numpy(), expected)


@pytest.mark.parametrize("shape", [32, np.int64(32), (8, 4), [2, -1], np.array([4, 8])], ids=str)
def test_shapes_are_any_integers(shape):
    x = ns.Tensor(X, requires_grad=True)
    y = x.reshape(shape)
    np.testing.assert_array_equal(y.data, X.reshape(shape))
    y.backward(np.ones(y.shape))
    assert x.grad.shape == X.shape
