"""What functions mean, in NumPy."""

import numpy as np
from scipy.special import expit, logsumexp, ndtr


def gelu(x):
    return np.maximum(x, -50) * ndtr(x)  # 0, and not NaN, at minus infinity


def gelu_slope(x):
    x = np.clip(x, -50, 50)  # beyond, it is 0 and 1
    return ndtr(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def gelu_tanh(x):
    """Written so that it is 0, and not NaN, at minus infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        y = x * expit(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return np.where(x < -50, 0, y)


def gelu_tanh_slope(x):
    x = np.clip(x, -50, 50)  # beyond, it is 0 and 1
    t, du = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)), 1 + 3 * 0.044715 * x * x
    return (1 + t + x * (1 - t * t) * np.sqrt(2 / np.pi) * du) / 2


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def elu_slope(x):
    return np.exp(np.minimum(x, 0))


def relu_grad(x, dy):
    return np.where(x > 0, dy, 0)


def stretched_sigmoid(x):
    return np.clip(1.2 * expit(x) - 0.1, 0, 1)


def stretched_sigmoid_grad(x, dy):
    y = stretched_sigmoid(x)
    return np.where((y > 0) & (y < 1), dy * 1.2 * expit(x) * expit(-x), 0)


def elu_grad(x, dy):
    return dy * elu_slope(x)


def gelu_grad(x, dy):
    return dy * gelu_slope(x)


def gelu_tanh_grad(x, dy):
    return dy * gelu_tanh_slope(x)


def concat_elu(x):
    return np.concatenate([elu(x), elu(-x)], -1)


def concat_elu_grad(x, dy):
    n = x.shape[-1]
    return dy[..., :n] * elu_slope(x) - dy[..., n:] * elu_slope(-x)


def concat_elu_grad_terms(x, dy):
    n = x.shape[-1]
    return abs(dy[..., :n]) * elu_slope(x) + abs(dy[..., n:]) * elu_slope(-x)


def halves(x):
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def glu(x):
    a, b = halves(x)
    return a * expit(b)


def glu_grad(x, dy):
    a, s = halves(x)[0], expit(halves(x)[1])
    return np.concatenate([dy * s, dy * a * s * (1 - s)], -1)


def glu_grad_terms(x, dy):
    return np.concatenate([dy, dy * halves(x)[0]], -1)


def softmax_grad(y, dy):
    return y * (dy - (y * dy).sum(-1, keepdims=True))


def softmax_grad_terms(y, dy):
    return y * (abs(dy) + abs(y * dy).sum(-1, keepdims=True))


def log_softmax(x):
    shifted = x - x.max(-1, keepdims=True, initial=-np.inf)  # NaN of infinity, as of torch's
    return shifted - logsumexp(shifted, -1, keepdims=True)


def log_softmax_grad(y, dy):
    return dy - np.exp(y) * dy.sum(-1, keepdims=True)


def log_softmax_grad_terms(y, dy):
    return abs(dy) + np.exp(y) * abs(dy).sum(-1, keepdims=True)


def layer_norm(x, gain=1.0, bias=0.0, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gain + bias


def layer_norm_terms(x, gain=1.0, bias=0.0, eps=1e-5):
    """The mean is as wrong as the largest value; so are the deviation and what it divides."""
    size = abs(x).max(-1, keepdims=True, initial=0) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return size * (1 + abs(layer_norm(x))) * abs(gain) + abs(bias)


def layer_norm_grad(y, inverse_std, dy):
    along = (y * dy).mean(-1, keepdims=True)
    return inverse_std.reshape(*y.shape[:-1], 1) * (dy - dy.mean(-1, keepdims=True) - y * along)


def layer_norm_grad_terms(y, inverse_std, dy):
    along = abs(y * dy).mean(-1, keepdims=True)
    size = abs(dy) + abs(dy).mean(-1, keepdims=True) + abs(y) * along
    return inverse_std.reshape(*y.shape[:-1], 1) * size


def sum_to(a, shape):
    extra = tuple(range(a.ndim - len(shape)))
    kept = tuple(i for i, n in enumerate(shape, len(extra)) if n == 1)
    return a.sum(extra + kept).reshape(shape)


def put(values, shape, key):
    whole = np.zeros(shape)
    whole[key] = values
    return whole


def sum_rows(dy, indices, rows):
    table = np.zeros((rows, dy.shape[-1]))
    np.add.at(table, indices, dy)
    return table


def losses(x, targets):
    return -np.take_along_axis(log_softmax(x), targets[..., None], -1)[..., 0]


def cross_entropy_grad(p, dlosses, targets):
    return (p - np.eye(p.shape[-1])[targets]) * dlosses[:, None]


def norm(*arrays):
    return np.sqrt(sum((a * a).sum() for a in arrays))
