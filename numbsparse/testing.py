"""For those who write functions and kernels: is the gradient right, is the kernel, at what cost?

`check_grads` compares gradients with differences, `check_rung` a kernel with SciPy's product. In
the simulator `count` says what kernels read and write, `races` what two threads may touch at once.

>>> import numpy as np, numbsparse as ns
>>> ns.testing.check_grads(lambda x: (x * x).sum(), np.ones(3))
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from numbsparse import autograd, ops
from numbsparse.autograd import Tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, memory, to_device
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import PRECISIONS, PRODUCTS, k0_reference
from numbsparse.layout import Index, Layout
from numbsparse.patterns.checks import any_generator, integer, number, word
from numbsparse.simulator.accesses import record
from numbsparse.simulator.counting import Count, count
from numbsparse.simulator.races import Race, races
from numbsparse.simulator.tracing import Trace, trace
from numbsparse.simulator.turns import in_turns

__all__ = [
    "Case",
    "Count",
    "Race",
    "Trace",
    "check_grads",
    "check_rung",
    "count",
    "in_turns",
    "races",
    "record",
    "trace",
]


def check_grads(
    function: Callable[..., Tensor], *inputs: Any, order: int = 1, seed: Any = 0
) -> None:
    """Compare the gradients of a function with central differences, along random directions.

    For random u and v, u . J v from `backward` must agree with
    u . (f(x + h v) - f(x - h v)) / 2h: one number that holds every entry of the Jacobian J. It may
    differ by 1e-6 of the terms of that sum, or by 1e-6: multiply a function whose slopes are small.

    Parameters
    ----------
    function : takes Tensors, gives a Tensor
    inputs : float64 arrays or BlockSparse matrices on the CPU
    order : int
        2 also checks the gradients of the gradients.
    seed : int or numpy.random.Generator

    Raises
    ------
    AssertionError
        If they disagree; it says by how much.
    TypeError
        If an input is not of float64: differences need its accuracy.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> ns.testing.check_grads(ns.nn.functional.tanh, np.linspace(-2, 2, 5), order=2)
    """
    rng = any_generator(seed)
    for i, data in enumerate(inputs):
        if not isinstance(data, np.ndarray | BlockSparse) or str(data.dtype) != "float64":
            got = getattr(data, "dtype", repr(data))
            raise TypeError(f"inputs[{i}] takes an array of float64 on the CPU, got {got}")
    tensors = [Tensor(data, requires_grad=True) for data in inputs]
    y = function(*tensors)
    u = _drawn_like(y.data, rng)
    directions = [_drawn_like(data, rng) for data in inputs]

    gradients = autograd.grad(y, tensors, grad_output=_like(y.data, u), create_graph=order > 1)
    slope = sum(
        float(np.vdot(_values(gradient.data), v))
        for gradient, v in zip(gradients, directions, strict=True)
        if gradient is not None
    )
    expected, scale = _slope(function, inputs, directions, u)
    if not abs(slope - expected) <= 1e-6 * max(scale, 1.0):
        raise AssertionError(f"gradient: backward gives {slope}, differences give {expected}")
    if order > 1:

        def gradients_of(*tensors: Tensor) -> Tensor:
            """The gradients for a given gradient of the output, summed along the directions."""
            *tensors_, dy = tensors
            found = autograd.grad(function(*tensors_), tensors_, grad_output=dy, create_graph=True)
            parts = [
                _weighted_sum(g, v) for g, v in zip(found, directions, strict=True) if g is not None
            ]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total

        check_grads(gradients_of, *inputs, _like(y.data, u), order=order - 1, seed=rng)


def _drawn_like(data: Any, rng: np.random.Generator) -> np.ndarray:
    """Random numbers, zeros beyond the edge of a BlockSparse."""
    drawn = rng.standard_normal(_values(data).shape)
    return _values(data.with_values(drawn)) if isinstance(data, BlockSparse) else drawn


def _slope(function: Any, inputs: Any, directions: Any, u: Any) -> tuple[float, float]:
    """u . (f(x + h v) - f(x - h v)) / 2h, and the size of the terms in that sum."""
    h = 1e-5

    def at(step: float) -> np.ndarray:
        moved = [
            Tensor(_like(data, _values(data) + step * v), requires_grad=True)
            for data, v in zip(inputs, directions, strict=True)
        ]
        return _values(function(*moved).data)

    change = (at(h) - at(-h)) / (2 * h)
    return float(np.vdot(u, change)), float(np.abs(u * change).sum())


def _weighted_sum(gradient: Tensor, v: np.ndarray) -> Tensor:
    """sum(gradient * v), differentiable, for dense and block-sparse gradients."""
    if not isinstance(gradient.data, BlockSparse):
        return (gradient * v).sum()
    # sum(g * v) over the kept blocks is u @ g summed against a dense v.
    rows = Tensor(np.eye(gradient.shape[0]))
    return ((rows @ gradient) * gradient.data.with_values(v).toarray()).sum()


def _values(data: Any) -> np.ndarray:
    return ops.inside(data) if isinstance(data, BlockSparse) else data


def _like(data: Any, values: np.ndarray) -> Any:
    return data.with_values(values) if isinstance(data, BlockSparse) else values


@dataclass(frozen=True)
class Case:
    """A random problem for a rung of the ladder.

    >>> from numbsparse.testing import Case
    >>> print(Case(batch=3, in_features=16, out_features=24, block_size=8))
    3x16x24-B8-d0.4
    """

    batch: int
    in_features: int
    out_features: int
    block_size: int
    density: float = 0.4

    def __post_init__(self) -> None:
        for name in ("batch", "in_features", "out_features", "block_size"):
            integer(name, getattr(self, name), name != "batch")
        number("density", self.density, 1)

    def __str__(self) -> str:
        return (
            f"{self.batch}x{self.in_features}x{self.out_features}"
            f"-B{self.block_size}-d{self.density:g}"
        )

    def layout(self, rng: np.random.Generator) -> Layout:
        """Random blocks, one at least unless the density is 0; where there are more than one, a row
        and a column are left empty."""
        grid = (-(-self.in_features // self.block_size), -(-self.out_features // self.block_size))
        pattern = rng.random(grid) < self.density
        if self.density < 1:
            pattern[rng.integers(grid[0])] &= grid[0] == 1
            pattern[:, rng.integers(grid[1])] &= grid[1] == 1
        pattern[0, 0] |= self.density > 0 and not pattern.any()
        return Layout(pattern)


def check_rung(
    rung: ModuleType,
    product: str,
    case: Case,
    dtype: Any,
    place: str,
    seed: Any = 0,
    precision: str = "highest",
    feature_major: bool | tuple[bool, bool] = False,
    tile: int | None = None,
    contiguous: bool = False,
) -> None:
    """Run one product of one rung on random data, and compare it with `k0_reference`.

    The output is NaN before; what `values` holds beyond the edge is NaN; the inputs are strided.
    An output may differ by as much as its sum's length allows: n * eps * sum of `|a| |b|` in the
    accumulator's precision, and one rounding to its own dtype; for float32 also by the rung's
    PRODUCT_ERROR, and at "high" by operands that were rounded to tf32.

    Parameters
    ----------
    rung : a module, or another object, with the four names of `numbsparse.kernels.matmul`
    product : "forward", "input_grad" or "weight_grad"
    case : Case
    dtype : dtype of all operands, "bfloat16" too where ml_dtypes is installed
    place : "cpu" or "cuda"
    seed : int or numpy.random.Generator
    precision : "highest" or "high"
    feature_major : whether activations are (features, batch) in memory; inputs with gaps between
        the features, such that each begins at 16 bytes. Or two: of x and y (dy and dx in
        input_grad), of x and dy in weight_grad
    tile : the number of one of the rung's tiles, where it has several
    contiguous : whether x and dy are C-contiguous, as steps of `kernels.ladder` take them

    Raises AssertionError that says where and by how much they differ, or that the rung wrote to an
    operand; ValueError for another product, place or precision.

    Examples
    --------
    >>> from numbsparse.kernels.matmul import LADDER
    >>> from numbsparse.testing import Case, check_rung
    >>> check_rung(LADDER["k0_cpu"], "forward", Case(3, 20, 12, 8), "float32", "cpu")
    """
    word("product", product, PRODUCTS)
    word("place", place, ("cpu", "cuda"))
    word("precision", precision, PRECISIONS)
    rng, dtype = any_generator(seed), as_dtype(dtype)
    layout = case.layout(rng)
    lay = np.ascontiguousarray if contiguous else _strided
    x = lay(rng.standard_normal((case.batch, case.in_features)).astype(dtype))
    dy = lay(rng.standard_normal((case.batch, case.out_features)).astype(dtype))
    values = rng.standard_normal((layout.n_blocks, case.block_size, case.block_size)).astype(dtype)
    inside = _inside(layout, case)
    values[~inside] = np.nan
    if product == "weight_grad":
        operands, terms = (x, dy), case.batch
        out_shape: tuple[int, ...] = values.shape
    else:
        lines = layout.index.columns if product == "forward" else layout.index.rows
        width = case.out_features if product == "forward" else case.in_features
        operands, out_shape = (x if product == "forward" else dy, values), (case.batch, width)
        terms = int(np.diff(lines.indptr).max()) * case.block_size

    exact = list(map(_exact, operands))
    got = memory.hole(out_shape, dtype)
    run = getattr(rung, product)
    run = run if tile is None else partial(run, tile=tile)
    lent = _run(run, operands, layout, got, place, precision, feature_major)
    expected, magnitude = np.full(out_shape, np.nan), np.full(out_shape, np.nan)
    getattr(k0_reference, product)(*exact, layout.index, expected)
    getattr(k0_reference, product)(*(abs(operand) for operand in exact), layout.index, magnitude)

    accumulator = np.float64 if dtype == np.float64 else np.float32
    inexact = getattr(rung, "PRODUCT_ERROR", 0) if dtype == np.float32 else 0
    bound = (terms + 2 + inexact) * np.finfo(accumulator).eps * magnitude
    if precision == "high" and dtype == np.float32:
        bound += 2.0**-9 * magnitude  # two operands, each within 2^-10 of itself
    bound += float(finfo(dtype).eps) * abs(expected) + float(finfo(dtype).smallest_subnormal)
    wrong = ~(abs(got.astype(np.float64) - expected) <= bound)  # NaN is wrong
    what = f"{getattr(rung, '__name__', 'rung')} {product} {case}"
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} outputs are wrong; at {first} {got[first]} "
            f"where {expected[first]} +- {bound[first]} is right"
        )
    if any((_exact(a) != before).any() for a, before in zip(lent, exact, strict=True)):
        raise AssertionError(f"{what}: it wrote to an operand")


def _run(
    run: Callable[..., None],
    operands: Any,
    layout: Layout,
    out: Any,
    place: str,
    precision: str,
    feature_major: bool | tuple[bool, bool],
) -> Any:
    """Fill `out`; gives the operands as they are afterwards."""
    first, second = (feature_major,) * 2 if isinstance(feature_major, bool) else feature_major
    send: Any = to_device if place == "cuda" else np.ascontiguousarray
    by_rows: Any = _strided_to_device if place == "cuda" else lambda array: array
    there = send(out.T).T if second and out.ndim == 2 else send(out)
    operands = [
        by_rows(a) if not across else _feature_major(a, send) if a.ndim == 2 else send(a)
        for a, across in zip(operands, (first, second), strict=True)
    ]
    index: Index = ops.index_beside(layout, there)
    run(*operands, index, there, precision)
    out[:] = there.numpy() if isinstance(there, DeviceArray) else there
    return operands


def _exact(operand: Any) -> np.ndarray:
    """The numbers of an operand in float64, zeros for NaN."""
    on_host = operand.numpy() if isinstance(operand, DeviceArray) else operand
    return np.nan_to_num(on_host.astype(np.float64))


def _inside(layout: Layout, case: Case) -> np.ndarray:
    """Which stored values are inside the matrix: bool, (n_blocks, B, B)."""
    offsets = np.arange(case.block_size)
    rows = layout.index.block_rows[:, None] * case.block_size + offsets < case.in_features
    columns = layout.index.block_columns[:, None] * case.block_size + offsets < case.out_features
    return rows[:, :, None] & columns[:, None, :]


def _strided(array: np.ndarray) -> np.ndarray:
    """The same values, every second of a longer row: no kernel may count on contiguous rows."""
    wide = np.full((array.shape[0], 2, array.shape[1]), np.nan, array.dtype)
    wide[:, 0] = array
    return wide[:, 0]


def _feature_major(array: np.ndarray, send: Any) -> Any:
    """array (batch, features) in lines of the batch, NaN after the last of each."""
    batch, features = array.shape
    wide = np.full((features, -(-batch // 8) * 8), np.nan, array.dtype)
    wide[:, :batch] = array.T
    return send(wide)[:, :batch].T


def _strided_to_device(array: np.ndarray) -> DeviceArray:
    """A copy on the device with the strides kept: the array it is a view of goes along."""
    if array.base is None or array.ndim != 2:
        return to_device(array)
    return to_device(array.base)[:, 0]
