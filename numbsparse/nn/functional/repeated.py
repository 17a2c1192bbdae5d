"""What a loop uses in each of its steps: gradients are gathered, and summed once at the end.

The weight of a recurrent cell multiplies an input in every step t, and its gradient is a sum,
dw = sum over t of x_t.T @ dy_t. The tape would compute and add a whole dw for each step. Here a use
only notes its (x_t, dy_t); once all are there, one product over the inputs of all steps is left:
dw = concatenate(x).T @ concatenate(dy). The same for the gain and bias of a normalization.

Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017, group up to eight steps so.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

from numbsparse import ops
from numbsparse.autograd import (
    Tensor,
    as_tensor,
    differentiable_grads,
    is_recording,
    record,
    unchanged,
    unread,
)
from numbsparse.device import DeviceArray, empty, on
from numbsparse.nn.functional.activations import relu
from numbsparse.nn.functional.arithmetic import add, as_matrix, multiply
from numbsparse.nn.functional.joint import jointly
from numbsparse.nn.functional.layers import inner_product, layer_norm
from numbsparse.nn.functional.products import matmul, sddmm
from numbsparse.nn.functional.shape import concatenate, transpose
from numbsparse.ops.normalize import Place
from numbsparse.patterns.checks import integer


def repeated_product(
    w: Tensor, *, precision: str | None = None, calls: int = 1
) -> Callable[[Tensor], Tensor]:
    """A function x -> x @ w for a loop: the weight-gradients of all calls become one product.

    Parameters
    ----------
    w : Tensor of a BlockSparse, (in_features, out_features)
    precision : "highest" or "high", optional
    calls : int
        How many to expect; on a GPU so many results are adjacent in memory.

    Returns
    -------
    function of a Tensor x, (batch, in_features), with gradients of gradients

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> w = ns.Tensor(ns.BlockSparse(np.ones((1, 4, 4)), [[1]]), requires_grad=True)
    >>> h, times_w = ns.Tensor(np.full((1, 4), 0.5)), ns.nn.functional.repeated_product(w)
    >>> for _ in range(3):
    ...     h = times_w(h)
    >>> h.sum().backward()  # one product of (4, 3) and (3, 4)
    >>> w.grad.numpy()[0]
    array([24., 24., 24., 24.])
    """
    how: Any = {"precision": ops.checked_precision(precision)}

    def product_of_all(terms: Any, y: Tensor) -> Tensor:
        xs, dys = (list(of) for of in zip(*reversed(terms), strict=True))
        return sddmm(transpose(concatenate(xs)), concatenate(dys), kept, **how)

    kept = unread(w := as_matrix(w))
    hidden = record(w.data, (w, product_of_all))
    places = Places(calls)

    def times_w(x: Any) -> Tensor:
        x, out = as_tensor(x), None
        if w.place == x.place == "cuda":
            with on(w.device):
                out = places.next()((x.shape[0], w.shape[1]), w.dtype)
        return record(
            ops.matmul(x.data, w.data, out=out, **how),
            (x, lambda dy, y: matmul(dy, transpose(w), **how)),
            (hidden, lambda dy, y: unchanged(x) or Terms([(x, dy)])),  # type: ignore[arg-type,func-returns-value,return-value]
            held=[w],
        )

    return times_w


def repeated_norm(
    gain: Tensor, bias: Tensor, eps: float = 1e-5, *, calls: int = 1
) -> Callable[..., Tensor]:
    """A layer normalization for a loop, and what follows it: see `ops.affine_norm`.

    Parameters
    ----------
    gain, bias : Tensor, (width,) or (groups, width)
    eps : float
    calls : int
        How many to expect, as in `repeated_product`.

    Returns
    -------
    function (x, kind="plain", other=None) of Tensors, (batch, width) or (batch, groups, width)
        v = (x - mean) / sqrt(variance + eps) * gain + bias; by its kind v ("plain"), max(v, 0)
        ("relu"), v * other ("times") or max(v + other, 0) ("plus_relu").
    """

    def sums(terms: Any, y: Tensor) -> list[Any]:
        return [Tensor(d) for d in ops.affine_norm_sums(terms[::-1], gain.data)]

    def sums_again(terms: Any, y: Tensor) -> list[Any]:
        return [None if of[0] is None else reduce(add, of) for of in zip(*terms, strict=True)]

    gain, bias = as_tensor(gain, "gain"), as_tensor(bias, "bias")
    hidden = record(gain.data, *jointly(sums, gain, bias, again=sums_again))
    of_results = [Places(calls) for _ in range(3)]
    of_gradients = [Places(calls) for _ in range(3)]

    def norm(x: Any, kind: str = "plain", other: Any = None) -> Tensor:
        x, other = as_tensor(x), None if other is None else as_tensor(other, "other")
        second = None if other is None else other.data
        affine, results = (gain.data, bias.data), [places.next() for places in of_results]
        at = [places.next() for places in of_gradients]
        y, normalized = ops.affine_norm(kind, x.data, *affine, eps, second, results)
        read = (gain, bias, other) if kind == "times" and other is not None else (gain,)

        def gradients(dy: Tensor, y: Tensor) -> list[Any]:
            unchanged(*read)
            dx, dv, dother = ops.affine_norm_grad(
                kind, normalized, *affine, second, y.data, dy.data, at
            )
            terms = Terms([(normalized, dv)])
            return [Tensor(dx), terms, None if dother is None else Tensor(dother)]

        def again(dy: Tensor, y: Tensor) -> list[Any]:
            def weighted(*given: Tensor) -> Tensor:
                return inner_product([norm_of_kind(kind, eps, *given[:-1])], given[-1:])

            given = [x, gain, bias] if other is None else [x, gain, bias, other]
            dx, dgain, dbias, *dother = differentiable_grads(weighted, given, [dy])
            return [dx, Terms([(dgain, dbias)]), *dother]

        inputs = [x, hidden] if other is None else [x, hidden, other]
        return record(y, *jointly(gradients, *inputs, again=again), held=[gain, bias])

    return norm


def norm_of_kind(
    kind: str, eps: float, x: Tensor, gain: Tensor, bias: Tensor, other: Any = None
) -> Tensor:
    """What `repeated_norm` computes, of other functions."""
    v = add(multiply(layer_norm(x, eps=eps), gain), bias)
    if other is not None:
        v = multiply(v, other) if kind == "times" else add(v, other)
    return relu(v) if kind in ("relu", "plus_relu") else v


class Places:
    """Memory on the GPU for the arrays of so many calls, one after the other in memory.

    Without a tape, or of a shape that differs, an array gets memory of its own.
    """

    def __init__(self, calls: int):
        self.calls = self.given = integer("calls", calls)
        self.whole: list[DeviceArray] = []  # one array, once it is known

    def next(self) -> Place:
        """`empty` for the next call's array, whenever it is made."""
        if self.given == self.calls:
            self.given, self.whole = 0, []
        whole, i = self.whole, self.given
        self.given += 1
        if self.calls == 1 or not is_recording():
            return empty

        def place(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
            if not whole:
                whole.append(empty((self.calls, *shape), dtype))
            fits = whole[0].shape[1:] == shape and whole[0].dtype == dtype
            return whole[0][i] if fits else empty(shape, dtype)

        return place


class Terms(list[Any]):
    """What a gradient will be computed from; the sum of two gradients is computed from both."""

    def __add__(self, other: Any) -> "Terms":  # type: ignore[override]
        self.extend(other)
        return self
