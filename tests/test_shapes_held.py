"""What would broadcast, wrap around or be left out by mistake is refused, by name."""

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import nn, ops
from numbsparse.nn import functional as F
from numbsparse.testing import check_grads

A, CUBE = ns.Tensor(np.ones((3, 4))), ns.Tensor(np.ones((3, 2, 5)))
LAYOUT = ns.Layout([[1, 0], [1, 1]])
VALUES = np.arange(48.0).reshape(3, 4, 4)
W = ns.BlockSparse(VALUES, LAYOUT)
SMALL = ns.BlockSparse(np.ones((3, 2, 2)), LAYOUT)
X = np.ones((2, 8))


def targets(*shape):
    return np.zeros(shape, int)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: F.cross_entropy(CUBE, targets(2, 3)), ValueError,
         r"targets takes the shape \(3, 2\) with logits of \(3, 2, 5\), got \(2, 3\)"),
        (lambda: F.cross_entropy(CUBE, targets(6)), ValueError, r"\(3, 2\) with .* got \(6,\)"),
        (lambda: F.cross_entropy(CUBE, targets(3, 5)), ValueError, "targets takes the shape"),
        (lambda: F.cross_entropy(A, np.eye(4)[:3]), ValueError, r"one-hot .*argmax\(-1\)"),
        (lambda: F.cross_entropy(A, np.zeros(3)), TypeError, "targets takes integers"),
        (lambda: F.cross_entropy(ns.Tensor(1.0), targets()), ValueError, "logits takes .* classes"),
        (lambda: F.mse_loss(ns.Tensor(np.ones((4, 1))), np.ones(4)), ValueError,
         r"target takes the shape of the prediction, \(4, 1\), or a number, got \(4,\)"),
        (lambda: F.mse_loss(A, ns.Tensor(np.ones(4))), ValueError, "target takes the shape"),
        (lambda: F.mse_loss(np.ones(4), np.ones((3, 4))), ValueError, "target takes the shape"),
        (lambda: F.layer_norm(A, gain=np.ones(1)), ValueError, r"gain takes .*\(4,\) here"),
        (lambda: F.layer_norm(A, bias=np.ones((3, 4))), ValueError, r"bias takes .*\(4,\) here"),
        (lambda: F.linear(X, W, np.ones((2, 8))), ValueError, r"bias takes .*\(8,\) here"),
        (lambda: F.concatenate([A, A], axis=2), ValueError, "axis takes .*, got 2"),
        (lambda: F.concatenate([A, A], axis=-3), ValueError, "axis takes .*, got -3"),
        (lambda: F.stack([A, A], axis=3), ValueError, "axis takes .*, got 3"),
        (lambda: F.unbind(A, axis=2), ValueError, "axis takes .*, got 2"),
        (lambda: F.unbind(ns.Tensor(1.0)), ValueError, "axis takes .*, got 0"),
        (lambda: F.split(A, 2, axis=2), ValueError, "axis takes .*, got 2"),
        (lambda: F.split(A, -2), ValueError, "sections takes .*1, got -2"),
        (lambda: F.split(A, 0), ValueError, "sections takes .*1, got 0"),
        (lambda: F.split(A, 2.0), TypeError, "sections takes an integer"),
        (lambda: F.transpose(A, (2, 3)), ValueError, r"axes takes .*, got \(2, 3\)"),
        (lambda: F.transpose(A, (0,)), ValueError, r"axes takes 2 axes, got \(0,\)"),
        (lambda: F.sum(ns.Tensor(1.0), axis=0), ValueError, "axis takes .*, got 0"),
        (lambda: F.mean(ns.Tensor(1.0), axis=-1), ValueError, "axis takes .*, got -1"),
        (lambda: ops.max(np.array(1.0), 0), ValueError, "axis takes .*, got 0"),
        (lambda: ns.Tensor(W) + ns.Tensor(SMALL), ValueError, "b takes the shape .*8, 8.*4, 4"),
        (lambda: ns.Tensor(W) + ns.Tensor(ns.BlockSparse(VALUES, LAYOUT, shape=(8, 7))),
         ValueError, "b takes the shape"),
        (lambda: ns.Tensor(ns.BlockSparse(np.ones((3, 4, 4)), LAYOUT, shape=(5, 5)))
         + ns.Tensor(ns.BlockSparse(np.ones((3, 3, 3)), LAYOUT, shape=(5, 5))),
         ValueError, "b takes the block_size 4, got 3"),
        (lambda: (nn.Parameter(W) * 2.0).backward(np.ones((8, 8))), ValueError,
         "grad takes a BlockSparse"),
        (lambda: (A * nn.Parameter(np.ones((3, 4)))).backward(
            ns.BlockSparse.from_dense(np.ones((3, 4)), [[1]], block_size=4)),
         ValueError, "grad takes an array"),
        (lambda: (nn.Parameter(W) * 2.0).backward(W.T), ValueError, "grad takes the layout"),
        (lambda: (nn.Parameter(W) * 2.0).backward(ns.BlockSparse(VALUES, LAYOUT.T).T), ValueError,
         "grad takes blocks stored as"),
        (lambda: (nn.Parameter(W) * 2.0).backward(ns.BlockSparse(VALUES, LAYOUT.T)), ValueError,
         "grad takes the layout"),
        (lambda: ns.BlockSparse(np.ones((1, 4, 4)), [[1]], shape=(3.5, 4)), TypeError,
         r"shape\[0\] takes an integer .*3\.5"),
        (lambda: ns.BlockSparse(np.ones((1, 4, 4)), [[1]], shape=(4, True)), TypeError,
         r"shape\[1\] takes"),
        (lambda: ns.BlockSparse.from_dense(np.eye(4), [[1]], block_size=4.0), TypeError,
         "block_size takes"),
        (lambda: nn.init.uniform([[1]], 0), ValueError, "block_size takes"),
        (lambda: nn.init.normal([[1]], 4, shape=(3.5, 4)), TypeError, r"shape\[0\]"),
        (lambda: ns.sddmm(X.T, X, LAYOUT, block_size=0), ValueError, "block_size takes .*1, got 0"),
        (lambda: ns.sddmm(X.T, X, LAYOUT, block_size=4.0), TypeError, "block_size takes"),
        (lambda: ns.sddmm(X.T, X, W, block_size=8), ValueError, "block_size takes .*4, got 8"),
        (lambda: ns.sddmm(X.T, X, W.T, block_size=8), ValueError, "block_size takes .*4, got 8"),
        (lambda: ns.matmul(X, W, kernel=None), ValueError, 'kernel takes "auto" .*None'),
        (lambda: ns.conv(X[None], W, kernel_size=1, kernel=None), ValueError, "kernel takes"),
    ],
)  # fmt: skip
def test_refuses(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize("shape", [(-2, -2), (4, -2), (-1, -1)])
def test_sizes_below_0(put, shape):
    x = put(np.ones((2, 2), np.float32))
    for view in (x, x.T):
        with pytest.raises(ValueError, match="shape takes"):
            F.reshape(ns.Tensor(view), shape)
    with pytest.raises(ValueError, match="shape takes"):
        F.broadcast_to(ns.Tensor(put(np.ones((1, 1), np.float32))), shape)


def test_what_fits_is_taken():
    assert F.cross_entropy(A, [0, 1, 3]).item() == pytest.approx(np.log(4))
    assert F.cross_entropy(ns.Tensor(np.ones(4)), np.array(2)).item() == pytest.approx(np.log(4))
    assert F.mse_loss(A, np.float32(3)).item() == 4
    assert F.embedding(A, [[0, 2]]).shape == (1, 2, 4)
    assert F.sum(ns.Tensor(1.0), axis=()).item() == 1
    assert (ns.Tensor(W) * np.float32(2)).numpy()[7, 7] == 94
    assert ns.sddmm(X.T, X, W.T, block_size=4).shape == (8, 8)


def test_gradients_of_a_sum_with_a_transposed_matrix(rng):
    """Each in the order of its own blocks, which is what an optimizer steps by."""
    x, u = rng.standard_normal((3, 8)), ns.BlockSparse(VALUES / 10, LAYOUT.T)
    check_grads(lambda x, w, u: x @ (w + u.T), x, W, u, order=2)
    check_grads(lambda x, w, u: x @ (u.T + w), x, W, u, order=2)
    w, u = nn.Parameter(W), nn.Parameter(u)
    (ns.Tensor(x) @ (w + u.T)).sum().backward()
    np.testing.assert_array_equal(u.grad.numpy(), w.grad.numpy().T)
    assert not u.grad.data.is_transposed


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, np.int64(2), 0.0, 2.0])
def test_every_derivative_of_a_power_at_zero(put, exponent):
    x = ns.Tensor(put(np.float32([0.0, 1.0])), requires_grad=True)
    y, factor = x**exponent, 1.0
    for order in range(5):
        left = float(exponent) - order
        expected = [factor if left == 0 else 0.0, factor]
        np.testing.assert_array_equal(y.numpy(), expected)
        (y,) = ns.grad(y.sum(), [x], create_graph=True)
        factor *= left
