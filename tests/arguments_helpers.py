"""Odd values for every argument of a call: each is taken, or refused by the argument's name."""

import inspect
import re
from fractions import Fraction

import numpy as np

import numbsparse as ns
from numbsparse import nn

X = np.ones((2, 8), np.float32)
W = ns.BlockSparse(np.ones((3, 4, 4), np.float32), [[1, 0], [1, 1]])
ODD = [
    None, "a", "", b"x", "cuda:x", 1j, float("nan"), float("inf"), -1, 0, 1, 2, True, 1.5,
    2**63, 10**30, -(2**70), Fraction(1, 2), np.float32(2), np.int8(-3), np.timedelta64(3),
    np.datetime64("2020"), np.dtype("V3"), [], {}, (), set(), {3}, {"a": 1}, {1: X}, range(3),
    [[1], [1, 2]], [1.0, None], [[1, 1]], object(), slice(1), ..., np.array(3),
    np.zeros((0, 3)), X, X.T, X[0], *map(X.astype, (int, bool, complex, "f2", ">f4", float)),
    np.array(["a"]), np.array([None]), np.ma.masked_array(X, X > 0), np.ones((2, 2, 2)),
    W, W.T, W.layout, ns.Tensor(X), ns.Tensor(X, requires_grad=True), nn.ReLU(),
    nn.Linear(8, 8, block_size=4), np.random.default_rng(0),
]  # fmt: skip
MEET = [
    "kernel_size",
    "filter_fn",
    "h",
    "c",
]  # what an argument has to meet or has, and is named in its place
PASSED_ON = {"device", "dtype"}  # to torch, which says what it takes


def check_odd(call, right, more=()):
    """Each argument of a call, in turn, is each odd value, and `more` of another library's."""
    call(**right())
    names = [n for n in inspect.signature(call).parameters if n not in PASSED_ON]
    named = rf"\b({'|'.join([*names, *MEET])})\b.* (takes?|must be given)"
    for argument in names:
        for value in [*ODD, *more]:
            said = what_is_said(call, right() | {argument: value})
            assert said is None or re.search(named, said), (argument, value, said)


def what_is_said(call, arguments):
    """In the refusal of a call, or nothing; of too little memory the system says it."""
    try:
        call(**arguments)
    except (TypeError, ValueError) as refused:
        return str(refused)
    except MemoryError:
        return None
    return None
