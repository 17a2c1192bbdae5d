"""Random convolutions, rungs run on them, and what is right: dense, in float64, tap by tap."""

from dataclasses import dataclass
from itertools import product as every

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.conv import RUNGS, function_of, rung
from numbsparse.ops import conv_window


@dataclass(frozen=True)
class ConvCase:
    """A random problem; `density` of the kept blocks, each tap drawing its own."""

    batch: int
    space: tuple[int, ...]
    in_features: int
    out_features: int
    block_size: int
    kernel: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: object = 0
    dilation: int | tuple[int, ...] = 1
    density: float = 0.6

    def __str__(self):
        sizes = "x".join(map(str, (self.batch, *self.space, self.in_features, self.out_features)))
        kernel = "x".join(map(str, self.kernel))
        how = f"s{self.stride}p{self.padding}d{self.dilation}".replace(" ", "")
        return f"{sizes}-B{self.block_size}-k{kernel}{how}"

    @property
    def sizes(self):
        return {
            "kernel_size": self.kernel,
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
        }

    @property
    def window(self):
        return conv_window(self.space, *self.sizes.values())

    @property
    def out_space(self):
        return self.window.small[3 - len(self.space) :]


class ConvProblem:
    """Operands in `dtype`; what the weight holds beyond the features is NaN."""

    def __init__(self, case, dtype="float32", seed=0):
        rng, self.case, self.known = np.random.default_rng(seed), case, {}
        dtype, size = as_dtype(dtype), case.block_size
        taps = int(np.prod(case.kernel))
        grid = (-(-case.in_features // size), -(-case.out_features // size))
        pattern = rng.random((taps, *grid)) < case.density
        if grid[0] > 1:  # an in-block that no tap sees, and an out-block that sees none
            pattern[:, rng.integers(grid[0])] = False
        if grid[1] > 1:
            pattern[:, :, rng.integers(grid[1])] = False
        self.layout = ns.Layout(pattern.reshape(-1, grid[1]))
        values = rng.standard_normal((self.layout.n_blocks, size, size)).astype(dtype)
        dense = np.zeros((taps, grid[0], size, grid[1], size))
        inside = np.zeros(dense.shape, bool)
        inside.reshape(taps, grid[0] * size, grid[1] * size)[
            :, : case.in_features, : case.out_features
        ] = True
        row, column = self.layout.index.block_rows, self.layout.index.block_columns
        at = row // grid[0], row % grid[0], slice(None), column
        self.inside = inside[at]
        dense[at] = np.where(self.inside, values, 0)
        values[~self.inside] = np.nan
        shape = (self.layout.shape[0] * size, case.out_features)
        self.w = ns.BlockSparse(values, self.layout, shape=shape)
        dense = dense.reshape(*case.kernel, grid[0] * size, grid[1] * size)
        self.dense = dense[..., : case.in_features, : case.out_features]
        self.x = rng.standard_normal((case.batch, *case.space, case.in_features)).astype(dtype)
        self.dy = rng.standard_normal((case.batch, *case.out_space, case.out_features)).astype(
            dtype
        )

    def exact(self, product, magnitude=False):
        """The product in float64; of the operands' absolute values for its `magnitude`."""
        if (product, magnitude) not in self.known:
            self.known[product, magnitude] = self._exact(product, magnitude)
        return self.known[product, magnitude]

    def _exact(self, product, magnitude):
        x, dy, w = (a.astype(np.float64) for a in (self.x, self.dy, self.dense))
        if magnitude:
            x, dy, w = abs(x), abs(dy), abs(w)
        if product == "forward":
            return conv(x, w, self.case.window)
        if product == "input_grad":
            return conv_transpose(dy, w, self.case.window, x.shape)
        dw = conv_weight_grad(x, dy, self.case.window, w.shape)
        size, (taps, in_blocks) = self.case.block_size, (w[..., 0, 0].size, self.layout.shape[0])
        in_blocks //= taps
        padded = np.zeros((taps, in_blocks * size, self.layout.shape[1] * size))
        padded[:, : w.shape[-2], : w.shape[-1]] = dw.reshape(taps, *w.shape[-2:])
        blocks = padded.reshape(taps, in_blocks, size, self.layout.shape[1], size)
        row, column = self.layout.index.block_rows, self.layout.index.block_columns
        return blocks[row // in_blocks, row % in_blocks, :, column]

    def bound(self, product, dtype, extra=0.0):
        """How far a result may be off: its sum's length in the accumulator, and one rounding."""
        dtype, case = as_dtype(dtype), self.case
        per_line = np.diff(self.layout.index.columns.indptr).max() * case.block_size
        rows = np.bincount(
            self.layout.index.block_rows % max(-(-case.in_features // case.block_size), 1)
        )
        terms = {
            "forward": per_line,
            "input_grad": rows.max(initial=0) * case.block_size,
            "weight_grad": case.batch * np.prod(case.out_space),
        }[product]
        accumulator = np.float64 if dtype == np.float64 else np.float32
        magnitude = self.exact(product, magnitude=True)
        bound = (terms + 2) * np.finfo(accumulator).eps * magnitude
        rounding = float(finfo(dtype).eps) * abs(self.exact(product))
        return bound + rounding + float(finfo(dtype).smallest_subnormal)


def conv(x, w, window):
    """y[n, o] = sum over taps of what each sees, as a matrix product."""
    axes = x.ndim - 2
    y = np.zeros((x.shape[0], *window.small[3 - axes :], w.shape[-1]))
    padded = _padded(x, window, axes)
    for tap, of_padded in _slices(window, axes):
        seen = padded[(slice(None), *of_padded)]
        y += (seen.reshape(-1, x.shape[-1]) @ w[tap]).reshape(y.shape)  # one product, not many
    return y


def conv_transpose(dy, w, window, shape):
    axes = dy.ndim - 2
    dx = _padded(np.zeros(shape), window, axes)
    for tap, of_padded in _slices(window, axes):
        spread = dy.reshape(-1, dy.shape[-1]) @ w[tap].T
        dx[(slice(None), *of_padded)] += spread.reshape(*dy.shape[:-1], shape[-1])
    inside = tuple(
        slice(low, low + n)
        for low, n in zip(window.low[3 - axes :], window.big[3 - axes :], strict=True)
    )
    return dx[(slice(None), *inside)]


def conv_weight_grad(x, dy, window, shape):
    axes = x.ndim - 2
    dw, padded = np.zeros(shape), _padded(x, window, axes)
    for tap, of_padded in _slices(window, axes):
        seen = padded[(slice(None), *of_padded)]
        dw[tap] = seen.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
    return dw


def _padded(x, window, axes):
    """x with zeros around it, as far as any tap sees."""
    pads = [(0, 0)]
    for k in range(3 - axes, 3):
        reach = (window.small[k] - 1) * window.stride[k]
        reach += (window.kernel[k] - 1) * window.dilation[k] + 1
        pads.append((window.low[k], max(reach - window.low[k] - window.big[k], 0)))
    return np.pad(x, [*pads, (0, 0)])


def _slices(window, axes):
    for tap in every(*(range(n) for n in window.kernel[3 - axes :])):
        of_padded = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(
                tap,
                window.dilation[3 - axes :],
                window.small[3 - axes :],
                window.stride[3 - axes :],
                strict=True,
            )
        )
        yield tap, of_padded


needs_cuda = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")


def why_not(name, product, case, dtype):
    """Why a rung does not serve the case, or None."""
    how = case.block_size, as_dtype(dtype), RUNGS[name], case.batch, "highest"
    call = case.window, case.in_features, case.out_features
    return rung(name).unsupported(product, *how, *call)


def skip_unless_served(name, product, case, dtype):
    if (reason := why_not(name, product, case, dtype)) is not None:
        pytest.skip(reason)


def run(name, product, problem, place, precision="highest"):
    """A product of a rung into an output that is NaN before."""
    case, w = problem.case, problem.w
    x, dy = (
        a.reshape(case.batch, np.prod(a.shape[1:-1]), a.shape[-1]) for a in (problem.x, problem.dy)
    )
    first, second, out = {
        "forward": (x, w.values, problem.dy),
        "input_grad": (dy, w.values, problem.x),
        "weight_grad": (x, dy, w.values),
    }[product]
    shape = out.shape if out is w.values else (dy if out is problem.dy else x).shape
    blank = device.memory.hole(shape, out.dtype)
    send = device.to_device if place == "cuda" else np.ascontiguousarray
    there = send(blank)
    index = ops.index_beside(w.layout, there)
    compute = function_of(name, product)
    compute(send(first), send(second), index, case.window, there, precision)
    result = there.numpy() if place == "cuda" else there
    return result.reshape(out.shape)
