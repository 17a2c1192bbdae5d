"""What type checkers make of calls: never run, but read by mypy, in test_lint.py.

Each `type: ignore` stands where an error has to be; one that is not needed is an error itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import numbsparse as ns

if TYPE_CHECKING:
    from typing_extensions import assert_type


def products(
    x: np.ndarray, on_gpu: ns.DeviceArray, t: ns.Tensor, w: ns.BlockSparse, layout: ns.Layout
) -> None:
    assert_type(ns.matmul(x, w), np.ndarray)
    assert_type(ns.matmul(w, x, precision="high"), np.ndarray)
    assert_type(ns.matmul(on_gpu, w, out=on_gpu), ns.DeviceArray)
    assert_type(ns.matmul(x, w, gate=x), np.ndarray)
    assert_type(ns.matmul(t, w), ns.Tensor)
    assert_type(ns.matmul(t, w, gate=t), ns.Tensor)
    assert_type(ns.matmul(x, w, gate=t), ns.Tensor)
    assert_type(ns.matmul(w, t), ns.Tensor)
    assert_type(ns.matmul(x, t), ns.Tensor)
    assert_type(ns.sddmm(x.T, x, layout), ns.BlockSparse)
    assert_type(ns.sddmm(on_gpu, on_gpu, w), ns.BlockSparse)
    assert_type(ns.sddmm(x, t, [[1, 0]], block_size=4), ns.Tensor)
    assert_type(x @ w, np.ndarray)
    assert_type(w @ x, np.ndarray)
    assert_type(w @ on_gpu, ns.DeviceArray)
    assert_type(on_gpu @ w, ns.DeviceArray)
    assert_type(t @ w, ns.Tensor)
    assert_type(w @ t, ns.Tensor)


def layers(x: np.ndarray, t: ns.Tensor, w: ns.BlockSparse, lstm: ns.nn.LSTM) -> None:
    assert_type(w.data, np.ndarray | ns.DeviceArray)
    assert_type(t.data, np.ndarray | ns.DeviceArray | ns.BlockSparse)
    assert_type(t.matrix, ns.BlockSparse)
    linear = ns.nn.Linear(4, 4)
    assert_type(linear(x), ns.Tensor)
    assert_type(linear.weight.data, ns.BlockSparse)
    assert_type(ns.nn.Conv2d(4, 4, 3)(t), ns.Tensor)
    assert_type(lstm(t, None)[1], tuple[ns.Tensor, ns.Tensor])
    linear(x, x)  # type: ignore[call-arg]


def refused(x: np.ndarray, t: ns.Tensor, w: ns.BlockSparse) -> None:
    ns.matmul(5, "hello")  # type: ignore[call-overload]
    ns.matmul(x, x)  # type: ignore[call-overload]
    ns.matmul(w, w)  # type: ignore[call-overload]
    ns.matmul(t, w, out=x)  # type: ignore[call-overload]
    ns.matmul(x, w, precison="high")  # type: ignore[call-overload]
    ns.sddmm(x, w, w)  # type: ignore[call-overload]
    ns.sddmm(x, x, "a layout")  # type: ignore[call-overload]
    w @ "hello"  # type: ignore[type-var]
