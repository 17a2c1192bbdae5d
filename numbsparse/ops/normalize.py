"""Layer normalization, and the same with gain, bias and what follows it, for recurrent cells.

v = (x - mean) / sqrt(variance + eps) * gain + bias over the last axis, and then by its kind

| kind | y |
|---|---|
| "plain" | v |
| "relu" | max(v, 0) |
| "times" | v * other |
| "plus_relu" | max(v + other, 0) |

x is (batch, width), or (batch, groups, width) with a normalization for each group; gain and bias
are (width,) or (groups, width). On a GPU a kernel each way. Ba, Kiros and Hinton, "Layer
Normalization", 2016.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from numbsparse import kernels
from numbsparse.device import DeviceArray, empty
from numbsparse.ops.activations import relu, relu_grad
from numbsparse.ops.elementwise import cast, gapless
from numbsparse.ops.operands import alike, check_beside, check_form, on_gpu, together
from numbsparse.ops.reduce import sum as sum_over
from numbsparse.ops.shape import adjoining, reshape
from numbsparse.patterns.checks import number, word

KINDS = ("plain", "relu", "times", "plus_relu")


def layer_norm(x: Any, eps: float) -> tuple[Any, Any]:
    """(x - mean) / sqrt(variance + eps) over the last axis, and 1 / sqrt(variance + eps), (rows,).

    The second is float32 for float16.

    >>> normalised, inverse_std = layer_norm(np.float32([[1, 3]]), 0.0)
    >>> normalised
    array([[-1.,  1.]], dtype=float32)
    """
    gpu = on_gpu(x, "x")
    _check_width(x, "x")
    number("eps", eps)
    rows, width = _rows(x), x.shape[-1]
    if gpu:
        normalised, inverse_std = empty(x.shape, x.dtype), empty((rows,), np.float32)
        flat = reshape(x, (rows, width))
        kernels.normalize.layer_norm(flat, float(eps), normalised.reshape(rows, width), inverse_std)
        return normalised, inverse_std
    normalised = np.subtract(x, np.add.reduce(x, axis=-1, keepdims=True) / width, order="C")
    flat = normalised.reshape(rows, width)
    variance = np.einsum("ij,ij->i", flat, flat)
    variance /= width
    variance += eps
    inverse_std = 1 / np.sqrt(variance, out=variance)
    flat *= inverse_std[:, None]
    return normalised, inverse_std


def layer_norm_grad(normalised: Any, inverse_std: Any, dnormalised: Any) -> Any:
    """dx = inverse_std * (d - mean(d) - normalised * mean(d * normalised)), d = dnormalised.

    Parameters
    ----------
    normalised, dnormalised : array, (..., width)
    inverse_std : array, (rows,), as layer_norm gives it
    """
    gpu = alike(normalised=normalised, dnormalised=dnormalised)
    _check_width(normalised, "normalised")
    rows, width = _rows(normalised), normalised.shape[-1]
    dtype = np.dtype(np.float32) if gpu else normalised.dtype
    check_beside("inverse_std", inverse_std, (rows,), dtype, "normalised", normalised)
    y, dy = (reshape(a, (rows, width)) for a in (normalised, dnormalised))
    if gpu:
        dx = empty(normalised.shape, normalised.dtype)
        kernels.normalize.layer_norm_grad(y, inverse_std, dy, dx.reshape(rows, width))
        return dx
    mean_dot = np.einsum("ij,ij->i", y, dy) / width
    dx = np.multiply(y, -mean_dot[:, None], order="C")
    dx += dy
    dx -= np.add.reduce(dy, axis=1, keepdims=True) / width
    dx *= inverse_std[:, None]
    return dx.reshape(normalised.shape)


def _check_width(x: Any, argument: str) -> None:
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{argument} takes a last axis of at least 1, got the shape {x.shape}")


def _rows(x: Any) -> int:
    return x.size // x.shape[-1]


class Normalized(NamedTuple):
    """What a normalization leaves for its gradient: on a GPU x and statistics, else the values."""

    x: Any  # (rows, width); on the CPU (x - mean) / std
    mean: Any  # (rows,); on the CPU None
    inverse_std: Any  # (rows,)


Place = Callable[[tuple[int, ...], Any], DeviceArray]


def affine_norm(
    kind: str,
    x: Any,
    gain: Any,
    bias: Any,
    eps: float,
    other: Any = None,
    places: Sequence[Place] = (empty, empty, empty),
) -> tuple[Any, Normalized]:
    """y, and what `affine_norm_grad` takes.

    Parameters
    ----------
    kind : str, of `KINDS`
    x : array, (batch, width) or (batch, groups, width)
    gain, bias : array, of the last axes of x
    eps : float, at least 0
    other : array like x, of the kinds that have one
    places : functions like `empty`, which on a GPU say where y and its statistics are written

    >>> x, ones = np.float32([[1, 3]]), np.ones(2, np.float32)
    >>> affine_norm("plus_relu", x, ones, 0 * ones, 0.0, np.float32([[0.5, 0.5]]))[0]
    array([[0. , 1.5]], dtype=float32)
    """
    gpu = _check(kind, x, gain, bias, eps, other)
    if gpu:
        rows, width = x.size // x.shape[-1], x.shape[-1]
        flat, (gain, bias) = reshape(x, (rows, width)), _lines(gain, bias)
        second = None if other is None else reshape(other, (rows, width))
        y = places[0](x.shape, x.dtype)
        mean, inverse_std = (place((rows,), np.float32) for place in places[1:])
        out = y.reshape(rows, width)
        given = flat, gain, bias, float(eps), second
        kernels.affine_norm.forward(kind, *given, out, mean, inverse_std)
        return y, Normalized(flat, mean, inverse_std)
    n, inverse_std = layer_norm(x, eps)
    v = n * gain + bias
    if kind == "times":
        v *= other
    if kind == "plus_relu":
        v += other
    return relu(v) if "relu" in kind else v, Normalized(n, None, inverse_std)


def affine_norm_grad(
    kind: str,
    normalized: Normalized,
    gain: Any,
    bias: Any,
    other: Any,
    y: Any,
    dy: Any,
    places: Sequence[Place] = (empty, empty, empty),
) -> tuple[Any, Any, Any]:
    """(dx, dv, dother): the gradients of x, of v, which give those of gain and bias, of other.

    dv is dy ("plain"), dy where y > 0 ("relu", "plus_relu") or dy * other ("times"); dother is dv
    ("plus_relu"), dy * v ("times") or None. On a GPU `places` say where they are written.
    """
    if together(y=y, dy=dy):
        rows = normalized.x.shape
        dx = places[0](y.shape, y.dtype)
        dv = dy if kind == "plain" else places[1](y.shape, y.dtype)
        dother = places[2](y.shape, y.dtype) if kind == "times" else None
        flat = [
            None if a is None else reshape(a, rows)
            for a in (other, y, dy, dx, None if kind == "plain" else dv, dother)
        ]
        kernels.affine_norm.backward(kind, *normalized, *_lines(gain, bias), *flat)
        return dx, dv, dv if kind == "plus_relu" else dother
    n, _, inverse_std = normalized
    dv = dy * other if kind == "times" else relu_grad(y, dy) if "relu" in kind else dy
    dother = dv if kind == "plus_relu" else dy * (n * gain + bias) if kind == "times" else None
    return layer_norm_grad(n, inverse_std, dv * gain), dv, dother


def affine_norm_sums(terms: Sequence[tuple[Normalized, Any]], gain: Any) -> tuple[Any, Any]:
    """(dgain, dbias) of a gain that several normalizations share: terms of (normalized, dv).

    dgain = the sum over all batches of dv * (x - mean) / std, dbias that of dv; in float32 on a
    GPU, and rounded at the end.
    """
    if terms[0][0].mean is not None:
        return _sums_on_gpu([(*n, reshape(dv, n.x.shape)) for n, dv in terms], gain)
    dgain, dbias = np.zeros_like(gain), np.zeros_like(gain)
    for normalized, dv in terms:
        dgain += (dv * normalized.x).sum(axis=0)
        dbias += dv.sum(axis=0)
    return dgain, dbias


def _sums_on_gpu(terms: list[Any], gain: Any) -> tuple[Any, Any]:
    """The sums of terms (x, mean, inverse_std, dv): of all at once, where memory is adjacent."""
    wholes = [adjoining(arrays) for arrays in zip(*terms, strict=True)]
    if all(whole is not None for whole in wholes):
        terms = [wholes]
    (lines,) = _lines(gain)
    parts = (kernels.affine_norm.parts(x.shape[0] // lines.shape[0]) for x, *_ in terms)
    ends = np.cumsum([0, *parts])
    dgain, dbias = (empty((int(ends[-1]), *lines.shape), np.float32) for _ in range(2))
    for term, start, end in zip(terms, ends[:-1], ends[1:], strict=True):
        x, mean, inverse_std, dv = term
        kernels.affine_norm.sums(x, mean, inverse_std, dv, dgain[start:end], dbias[start:end])
    totals = (sum_over(d, 0).reshape(gain.shape) for d in (dgain, dbias))
    if gain.dtype != np.float32:
        totals = (cast(total, gain.dtype) for total in totals)
    of_gain, of_bias = totals
    return of_gain, of_bias


def _lines(*of_gain: Any) -> list[Any]:
    return [gapless(a).reshape(-1, a.shape[-1]) for a in of_gain]


def _check(kind: str, x: Any, gain: Any, bias: Any, eps: float, other: Any) -> bool:
    word("kind", kind, KINDS)
    number("eps", eps)
    if (other is None) != (kind in ("plain", "relu")):
        raise ValueError(f"other takes an array for the kinds times and plus_relu, kind is {kind}")
    arrays = {"x": x, "gain": gain, "bias": bias} | ({} if other is None else {"other": other})
    gpu = together(**arrays)
    if x.ndim not in (2, 3) or x.shape[-1] == 0:
        raise ValueError(f"x takes (batch, width) or (batch, groups, width), got {x.shape}")
    for name, shape in (("gain", x.shape[1:]), ("bias", x.shape[1:]), ("other", x.shape)):
        if name in arrays:
            check_form(name, arrays[name], shape, x.dtype)
    return gpu
