"""Activations, gates, softmax and dropout."""

from collections.abc import Callable
from math import pi
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, fused, record
from numbsparse.nn.functional.arithmetic import (
    add,
    exp,
    is_block_sparse,
    multiply,
    negative,
    subtract,
)
from numbsparse.nn.functional.columns import blocks_of, with_blocks
from numbsparse.nn.functional.shape import concatenate, reshape, split, sum
from numbsparse.ops.operands import on_gpu
from numbsparse.patterns.checks import number, word


def relu(x: Any) -> Tensor:
    """max(x, 0); the gradient at 0 is 0. Of a block-sparse tensor each value's, in its layout.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.relu(Tensor([-1.0, 2.0]))
    Tensor([0., 2.])
    """
    x = as_tensor(x)
    if is_block_sparse(x):
        return with_blocks(x.data, relu(blocks_of(x)))
    return record(ops.relu(x.data), (x, lambda dy, y: _relu_grad(x, dy)), reads=(x,))


def abs(x: Any) -> Tensor:
    """``|x|``; the gradient at 0 is 0. Of a block-sparse tensor each value's, in its layout.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.abs(Tensor([-1.0, 2.0]))  # or abs(Tensor([-1.0, 2.0]))
    Tensor([1., 2.])
    """
    x = as_tensor(x)
    return add(relu(x), relu(negative(x)))


def _relu_grad(x: Tensor, dy: Tensor) -> Tensor:
    # Piecewise linear: the second derivative with respect to x is zero.
    return record(ops.relu_grad(x.data, dy.data), (dy, lambda g, y: _relu_grad(x, g)))


def elu(x: Any) -> Tensor:
    """x where x > 0, else e^x - 1.

    Clevert, Unterthiner and Hochreiter, "Fast and Accurate Deep Network Learning by Exponential
    Linear Units", 2016.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.elu(Tensor([-1.0, 2.0]))
    Tensor([-0.63212056,  2.        ])
    """
    x = as_tensor(x)
    vjp = fused(lambda dy, y: ops.elu_grad(x.data, dy), lambda dy, y: multiply(dy, _elu_slope(x)))
    return record(ops.elu(x.data), (x, vjp))


def _elu_slope(x: Tensor) -> Tensor:
    """1 where x > 0, else e^x."""
    return exp(negative(relu(negative(x))))


def concat_elu(x: Any) -> Tensor:
    """elu(x) and elu(-x), one after the other along the last axis: (..., n) to (..., 2n).

    Salimans, Karpathy, Chen and Kingma, "PixelCNN++", 2017, whose code uses it throughout.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.concat_elu(Tensor([-1.0, 2.0]))
    Tensor([-0.63212056,  2.        ,  1.        , -0.86466472])
    """
    x = as_tensor(x)

    def again(dy: Tensor, y: Tensor) -> Tensor:
        first, second = split(dy, 2)
        return subtract(multiply(first, _elu_slope(x)), multiply(second, _elu_slope(negative(x))))

    vjp = fused(lambda dy, y: ops.concat_elu_grad(x.data, dy), again)
    return record(ops.concat_elu(x.data), (x, vjp))


def glu(x: Any) -> Tensor:
    """The gated linear unit, x[..., :n] * sigmoid(x[..., n:]): (..., 2n) to (..., n).

    Raises ValueError for an odd last axis. Dauphin, Fan, Auli and Grangier, "Language Modeling with
    Gated Convolutional Networks", 2017.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.glu(Tensor([[2.0, 4.0, 0.0, 0.0]]))
    Tensor([[1., 2.]])
    """
    x = as_tensor(x)

    def again(dy: Tensor, y: Tensor) -> Tensor:
        gate = split(x, 2)[1]
        by_gate = multiply(multiply(dy, y), sigmoid(negative(gate)))
        return concatenate([multiply(dy, sigmoid(gate)), by_gate], -1)

    return record(ops.glu(x.data), (x, fused(lambda dy, y: ops.glu_grad(x.data, dy), again)))


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x * Phi(x), where Phi(x) = (1 + erf(x / sqrt(2))) / 2 is how likely a normal number is below.

    Of a block-sparse tensor each value's, in its layout.

    With approximate="tanh" x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), as in GPT-2 and
    BERT: off by up to 5e-4. Raises ValueError for anything else.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.gelu(Tensor([-1.0, 0.0, 1.0]))
    Tensor([-0.15865525,  0.        ,  0.84134475])
    >>> F.gelu(Tensor([-1.0, 0.0, 1.0]), approximate="tanh")
    Tensor([-0.15880801,  0.        ,  0.84119199])
    """
    word("approximate", approximate, ("none", "tanh"))
    x, exact = as_tensor(x), approximate == "none"
    if is_block_sparse(x):
        return with_blocks(x.data, gelu(blocks_of(x), approximate))
    value, slope = (ops.gelu, ops.gelu_grad) if exact else (ops.gelu_tanh, ops.gelu_tanh_grad)
    slopes = _gelu_slope if exact else _gelu_tanh_slope
    vjp = fused(lambda dy, y: slope(x.data, dy), lambda dy, y: multiply(dy, slopes(x)))
    return record(value(x.data), (x, vjp))


def _gelu_slope(x: Tensor) -> Tensor:
    """Phi(x) + x * phi(x), whose own slope is phi(x) * (2 - x^2), with phi(x) = Phi'(x)."""

    def vjp(dy: Tensor, y: Tensor) -> Tensor:
        phi = multiply(exp(multiply(multiply(x, x), -0.5)), (2 * pi) ** -0.5)
        # In this order nothing overflows.
        return multiply(dy, subtract(add(phi, phi), multiply(multiply(x, phi), x)))

    ones = ops.full(x.shape, 1.0, x.dtype, x.device)
    return record(ops.gelu_grad(x.data, ones), (x, vjp))


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    """(1 + t) / 2 + x / 2 * (1 - t^2) * u', with t = tanh(u) and u = sqrt(2 / pi) (x + c x^3)."""
    c, scale = 0.044715, (2 / pi) ** 0.5
    t = tanh(multiply(add(x, multiply(multiply(multiply(x, x), x), c)), scale))
    flat = multiply(x, subtract(1.0, multiply(t, t)))
    bent = add(flat, multiply(multiply(multiply(flat, x), x), 3 * c))
    return multiply(add(add(t, 1.0), multiply(bent, scale)), 0.5)


def tanh(x: Any) -> Tensor:
    """The hyperbolic tangent.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.tanh(Tensor([0.0, 1.0]))
    Tensor([0.        , 0.76159416])
    """
    x = as_tensor(x)
    return record(ops.tanh(x.data), (x, lambda dy, y: multiply(dy, subtract(1.0, multiply(y, y)))))


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + e^-x).

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.sigmoid(Tensor([0.0, 2.0]))
    Tensor([0.5       , 0.88079708])
    """
    x = as_tensor(x)
    return record(
        ops.sigmoid(x.data), (x, lambda dy, y: multiply(dy, multiply(y, subtract(1.0, y))))
    )


def softplus(x: Any) -> Tensor:
    """log(1 + e^x), without overflow.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.softplus(Tensor([0.0, 1000.0]))
    Tensor([6.93147181e-01, 1.00000000e+03])
    """
    x = as_tensor(x)
    return record(ops.softplus(x.data), (x, lambda dy, y: multiply(dy, sigmoid(x))))


def log_sigmoid(x: Any) -> Tensor:
    """log(1 / (1 + e^-x)) = -softplus(-x).

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.log_sigmoid(Tensor([0.0, -1000.0]))
    Tensor([-6.93147181e-01, -1.00000000e+03])
    """
    x = as_tensor(x)
    on_gpu(x.data, "x")
    return negative(softplus(negative(x)))


def logsumexp(x: Any) -> Tensor:
    """log(sum(e^x)) along the last axis, which the result lacks.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.logsumexp(Tensor([[0.0, 0.0], [1000.0, 0.0]]))
    Tensor([6.93147181e-01, 1.00000000e+03])
    """
    x = as_tensor(x)

    def gradient(dy: Tensor, y: Tensor) -> Tensor:
        column = (*y.shape, 1)
        return multiply(exp(subtract(x, reshape(y, column))), reshape(dy, column))

    return record(ops.logsumexp(x.data), (x, gradient))


def softmax(x: Any) -> Tensor:
    """e^x / sum(e^x) along the last axis.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.softmax(Tensor([[0.0, 0.0], [0.0, 2.0]]))
    Tensor([[0.5       , 0.5       ],
            [0.11920292, 0.88079708]])
    """
    x = as_tensor(x)

    def again(dy: Tensor, y: Tensor) -> Tensor:
        return multiply(y, subtract(dy, sum(multiply(dy, y), -1, True)))

    return record(ops.softmax(x.data), (x, fused(lambda dy, y: ops.softmax_grad(y, dy), again)))


def log_softmax(x: Any) -> Tensor:
    """x - log(sum(e^x)) along the last axis.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.log_softmax(Tensor([0.0, 0.0]))
    Tensor([-0.69314718, -0.69314718])
    """
    x = as_tensor(x)

    def again(dy: Tensor, y: Tensor) -> Tensor:
        return subtract(dy, multiply(exp(y), sum(dy, -1, True)))

    vjp = fused(lambda dy, y: ops.log_softmax_grad(y, dy), again)
    return record(ops.log_softmax(x.data), (x, vjp))


def dropout(x: Any, rate: float, *, seed: int, call: int | Callable[[], int] = 0) -> Tensor:
    """Each value is zero with probability `rate`, and x / (1 - rate) otherwise.

    Which values is a function of (seed, call) and their position, the same on CPU and GPU.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.dropout(Tensor([1.0] * 6), 0.5, seed=0)
    Tensor([0., 2., 0., 0., 2., 0.])
    """
    x = as_tensor(x)
    on_gpu(x.data, "x")
    if number("rate", rate, below=1) == 0:
        return x
    return multiply(x, Tensor(ops.dropout_mask(x.shape, rate, seed, call, x.dtype, x.device)))
