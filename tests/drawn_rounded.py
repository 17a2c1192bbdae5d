"""Cells in float64 with their gradients, and how far rounding may take computed ones from them.

Every value has the error that computing it may leave: of a sum that which follows from its length,
of what is stored its rounding, and what the errors of the operands become, each times the slope.
Errors of different causes add up as their squares do.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np

SURE = 2  # so many times its error a value may be off by


class Arithmetic(NamedTuple):
    """What is computed with."""

    eps: float
    stored: float  # relative error of a number that is stored
    least: float  # smallest number that is stored
    operands: float = 0.0  # relative error of a product's two operands together
    near_0: float = 0.0  # error of a tanh that is exact to bits of 1


class Near:
    """Values and their errors."""

    def __init__(self, value: np.ndarray, how: Arithmetic, *errors: Any):
        self.value, self.how, self.shape = value, how, value.shape
        self.error = np.sqrt(sum(np.square(e) for e in errors)) + np.zeros(value.shape)

    def like(self, value: np.ndarray, *errors: Any) -> Near:
        return Near(value, self.how, self.how.eps * abs(value), *errors)

    def __add__(self, other: Near) -> Near:
        return self.like(self.value + other.value, self.error, other.error)

    def __sub__(self, other: Near) -> Near:
        return self.like(self.value - other.value, self.error, other.error)

    def __mul__(self, other: Near) -> Near:
        a, b = self.value, other.value
        errors = self.error * abs(b), other.error * abs(a), self.error * other.error
        return self.like(a * b, *errors)

    def squared(self) -> Near:
        """Both factors are off by the same: (a + e)**2 is off by 2 a e + e**2, not by as much as
        two errors of their own would leave, which is sqrt(2) a e."""
        return self.like(self.value**2, 2 * self.error * abs(self.value) + self.error**2)

    def __matmul__(self, other: Near) -> Near:
        a, b, how = self.value, other.value, self.how
        sums = ((a.shape[1] + 2) * how.eps + how.operands) * (abs(a) @ abs(b))
        of_a, of_b = self.error**2 @ b**2, a**2 @ other.error**2
        return Near(a @ b, how, sums, np.sqrt(of_a), np.sqrt(of_b))

    @property
    def T(self) -> Near:
        return Near(self.value.T, self.how, self.error.T)

    def __getitem__(self, key: Any) -> Near:
        return Near(self.value[key], self.how, self.error[key])

    def reshape(self, shape: tuple[int, ...]) -> Near:
        return Near(self.value.reshape(shape), self.how, self.error.reshape(shape))

    def sum(self, axis: int) -> Near:
        sums = (self.shape[axis] + 2) * self.how.eps * abs(self.value).sum(axis)
        return Near(self.value.sum(axis), self.how, sums, np.sqrt((self.error**2).sum(axis)))

    def mean(self) -> Near:
        """Over the last axis, which stays."""
        total, n = self.sum(-1), self.shape[-1]
        return self.like(total.value / n, total.error / n)[..., None]

    def stored(self) -> Near:
        rounding = self.how.stored * abs(self.value) + self.how.least
        return Near(self.value, self.how, self.error, rounding)

    def summed_to(self, shape: tuple[int, ...]) -> Near:
        """What was repeated along the first axes, summed over them."""
        total = self
        while len(total.shape) > len(shape):
            total = total.sum(0)
        return total


Pull = Callable[[Near], Near]


class Node:
    """A value on the tape, with the way back to what it was computed from."""

    numbers = count()

    def __init__(self, near: Near, *edges: tuple[Node, Pull]):
        self.near, self.edges, self.number = near, edges, next(self.numbers)

    def __add__(self, other: Node) -> Node:
        shape = other.near.shape
        back = (self, lambda d: d), (other, lambda d: d.summed_to(shape))
        return Node(self.near + other.near, *back)

    def __mul__(self, other: Node) -> Node:
        a, b = self.near, other.near
        back = (self, lambda d: d * b), (other, lambda d: (d * a).summed_to(b.shape))
        return Node(a * b, *back)

    def __matmul__(self, w: Node) -> Node:
        x = self.near
        return Node(x @ w.near, (self, lambda d: d @ w.near.T), (w, lambda d: x.T @ d)).stored()

    def __getitem__(self, key: Any) -> Node:
        like = self.near

        def back(d: Near) -> Near:
            whole = Near(np.zeros(like.shape), like.how)
            whole.value[key], whole.error[key] = d.value, d.error
            return whole

        return Node(like[key], (self, back))

    def reshape(self, *shape: int) -> Node:
        own = self.near.shape
        return Node(self.near.reshape(shape), (self, lambda d: d.reshape(own)))

    def stored(self) -> Node:
        """Rounded, and its gradient too."""
        return Node(self.near.stored(), (self, Near.stored))


def gradients(ends: list[tuple[Node, Near]]) -> dict[Node, Near]:
    """Of every node behind the ends, from theirs."""
    found: dict[Node, Near] = {}
    for node, d in ends:
        found[node] = found[node] + d if node in found else d
    done: dict[Node, Near] = {}
    while found:
        node = max(found, key=lambda node: node.number)
        d = done[node] = found.pop(node)
        for parent, pull in node.edges:
            part = pull(d)
            found[parent] = found[parent] + part if parent in found else part
    return done


def smooth(a: Node, value: np.ndarray, relative: Any, slope: Callable[[Near], Near]) -> Node:
    """A function whose slope is at most 1, and that of its slope too; of its value."""
    z, how = a.near, a.near.how
    own = relative * how.eps * abs(value) + how.near_0 + 2.0**-125
    at = slope(Near(value, how)).value
    y = Near(value, how, own, np.minimum(z.error * abs(at) + z.error**2 / 4, 1)).stored()
    return Node(y, (a, lambda d: d * slope(y)))


def sigmoid(a: Node) -> Node:
    z = a.near.value
    one = Near(np.ones(()), a.near.how)
    with np.errstate(over="ignore"):
        return smooth(a, 1 / (1 + np.exp(-z)), 8 + abs(z), lambda y: y * (one - y))


def tanh(a: Node) -> Node:
    one = Near(np.ones(()), a.near.how)
    return smooth(a, np.tanh(a.near.value), 8, lambda y: one - y.squared())


def relu(a: Node) -> Node:
    z = a.near

    def back(d: Near) -> Near:
        unsure = abs(z.value) <= SURE * z.error
        return Near(d.value * (z.value > 0), z.how, d.error, unsure * abs(d.value))

    return Node(Near(np.maximum(z.value, 0), z.how, z.error), (a, back))


def normalised(a: Node, eps: float) -> Node:
    """(a - mean) / sqrt(variance + eps), over the last axis."""
    centred = a.near - a.near.mean()
    variance = centred.squared().mean()
    s, most = 1 / np.sqrt(variance.value + eps), 1 / np.sqrt(eps)
    of_s = np.minimum(s**3 / 2 * variance.error, np.maximum(most - s, s))
    scale = centred.like(s, 4 * a.near.how.eps * s, of_s)
    n = centred * scale
    n.error = np.minimum(n.error, np.sqrt(n.shape[-1]))  # no value is more
    n = n.stored()
    back = lambda d: scale * (d - d.mean() - n * (d * n).mean())  # noqa: E731
    return Node(n, (a, back))


def cell(z: Node, c: Node, kept: Node | None) -> tuple[Node, Node]:
    """(h, c) from z (batch, 4, units)."""
    i, f, o = (sigmoid(z[:, k]) for k in (0, 1, 3))
    update = i * tanh(z[:, 2])
    c = f * c + (update if kept is None else update * kept)
    return (o * tanh(c)).stored(), c


def lstm(
    xs: list[Node], p: dict[str, Node], h: Node, c: Node, kept: list[Any], eps: float
) -> tuple[list[Node], Node]:
    """h of every step and the last c; p has weight_ih (inputs, 4 * units), bias (4, units), ..."""
    ys = []
    for x, share in zip(xs, kept, strict=True):
        z = (x @ p["weight_ih"] + h @ p["weight_hh"]).reshape(-1, *p["bias"].near.shape)
        if "gain" in p:
            z = normalised(z, eps) * p["gain"]
        h, c = cell((z + p["bias"]).stored(), c, share)
        ys.append(h)
    return ys, c


def multiplicative_lstm(
    xs: list[Node], p: dict[str, Node], h: Node, c: Node, kept: list[Any], eps: float
) -> tuple[list[Node], Node]:
    """The same of a MultiplicativeLSTM, by its parameters' names."""

    def norm(name: str, x: Node) -> Node:
        gain = p[f"{name}.gain"]
        z = (x @ p[f"{name}.weight"]).reshape(-1, *gain.near.shape)
        return (normalised(z, eps) * gain + p[f"{name}.bias"]).stored()

    ys, steps = [], sum(name.startswith("internal") for name in p) // 3
    for x, share in zip(xs, kept, strict=True):
        m, a = norm("multiplier", x), norm("addend", x)
        s = (norm("internal.0", h) * m).stored()
        s = relu(norm("internal.1", s) + a).stored()
        for step in range(2, steps):
            s = relu(norm(f"internal.{step}", s))
        h, c = cell(norm("gates", s), c, share)
        ys.append(h)
    return ys, c
