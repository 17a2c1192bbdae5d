"""The products as operators of torch, torch.ops.numbsparse.*, and what others of them are made of.

An operator takes tensors, words and numbers, so that torch can trace it without running it. It has
a kernel, the same for CPU and CUDA tensors, and a fake one, which only says what comes out; its
gradient, made of other operators; and a rule for torch.autocast.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
import torch

from numbsparse import ops
from numbsparse.block_sparse import BlockSparse, unchecked
from numbsparse.blocks import check_values, checked_shape
from numbsparse.device import in_library_of
from numbsparse.dtypes import bfloat16, type_name
from numbsparse.torch.dispatch import batched, counted, operator
from numbsparse.torch.handles import layout_of

ROWS_AND_BLOCKS = (2, 1), (0, 1), (1, 2)  # of f, t, s of a family: which of a, b, result has them
CODES: dict[torch.dtype, Any] = {  # NumPy's dtypes; bfloat16, which it lacks, goes by its bits
    torch.float16: np.dtype("f2"),
    torch.bfloat16: np.dtype("u2"),
    torch.float32: np.dtype("f4"),
    torch.float64: np.dtype("f8"),
}


def lent(x: torch.Tensor, argument: str) -> Any:
    """A tensor as operations take it: a NumPy array of the same memory, or itself on a GPU.

    torch's own .numpy() forbids to free the memory for good.
    """
    if x.is_cuda:
        return x
    check_dtype(argument, x.dtype)
    size, strides, items = x.element_size(), None, x.numel()
    if not x.is_contiguous():
        strides = tuple(size * stride for stride in x.stride())
        items = items and sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    memory = _bytes(size * items).from_address(x.data_ptr())
    memory.tensor = x  # lives as long as the array
    array: Any = np.ndarray(tuple(x.shape), CODES[x.dtype], memory, 0, strides)
    return array.view(bfloat16()) if x.dtype == torch.bfloat16 else array


def check_dtype(argument: str, dtype: torch.dtype) -> None:
    if dtype not in CODES:
        raise TypeError(f"{argument} takes one of {', '.join(map(str, CODES))}, got {dtype}")


def array_of(x: torch.Tensor, argument: str) -> Any:
    """A tensor as an array of ours, or of NumPy's."""
    return ops.operand(lent(x, argument), argument)


@lru_cache(maxsize=1024)
def _bytes(n: int) -> Any:
    return ctypes.c_char * n


def given_back(result: Any, like: torch.Tensor) -> torch.Tensor:
    """A result as a tensor, without a copy; `matmul` on a GPU gives one itself."""
    if isinstance(result, torch.Tensor):
        return result
    if type(result) is np.ndarray and result.dtype.char in "fd":  # as below, in half the time
        return torch.from_numpy(result)
    tensor: torch.Tensor = in_library_of(like, result)
    return tensor


_checked_shape = lru_cache(maxsize=1024)(checked_shape)


def matrix(values: torch.Tensor, layout: str, rows: int, columns: int) -> BlockSparse:
    """The matrix that values and the word for their layout say."""
    kept = layout_of(layout)
    check_values(values, kept.n_blocks)
    _checked_shape("w.shape", (rows, columns), kept.shape, values.shape[1])
    return unchecked(array_of(values.contiguous(), "values"), kept, (rows, columns))


def family(
    names: str,
    numbers: str,
    kernels: Any,
    shapes: Any,
    joined: Callable[..., Any],
    more: Any = ({}, {}, {}),
) -> tuple[Any, Any, Any]:
    """Define three operators closed under differentiation: y = f(x, w), x = t(y, w), w = s(x, y).

    Each is linear in both of its tensors, and its two gradients are the two others. w is the values
    of a matrix; after the tensors all three take the word for its layout, and then the `numbers`.
    Functions of all that give the `shapes` of results; of f and t with a batch axis in front,
    `joined` makes one call: see `batched`.
    """
    made: list[Any] = []

    def save(ctx: Any, tensors: Any, how: Any, output: Any) -> None:
        ctx.to_save = tensors  # as save_for_backward does, a call less
        ctx.how, ctx.layout = how, layout_of(how[0])  # which lives as long as the tape

    def backward(gradients: Any, ctx: Any, d: Any) -> tuple[Any, ...]:
        of, needs = (d, *ctx.saved_tensors), ctx.needs_input_grad
        (f, a, b), (g, c, e) = gradients
        return (
            made[f]((of[a], of[b]), ctx.how) if needs[0] else None,
            made[g]((of[c], of[e]), ctx.how) if needs[1] else None,
            None,
        )

    def tangent(product: int, ctx: Any, da: Any, db: Any, _: Any) -> Any:
        a, b = ctx.saved_tensors
        moved = [of for of in ((da, b), (a, db)) if of[0] is not None and of[1] is not None]
        return sum(made[product](of, ctx.how) for of in moved)

    for name, kernel, shape, gradients, also in zip(
        names.split(), kernels, shapes, ops.GRADIENTS, more, strict=True
    ):
        schema = f"{name}(Tensor a, Tensor b, str layout, {numbers}, str precision) -> Tensor"
        how: Any = {
            "save": save,
            "backward": lambda ctx, d, of=gradients: backward(of, ctx, d),  # torch takes no partial
            "tensors": 2,
            "jvp": partial(tangent, len(made)),
        } | also
        fake = partial(_fake, shape)
        rows_and_blocks = ROWS_AND_BLOCKS[len(made)]
        made.append(operator(schema, kernel, fake, **how))
        counted(name, partial(_operations, *rows_and_blocks))
        batched(name, fake, None if shape is of_blocks else joined)
    return made[0], made[1], made[2]


def _operations(rows: int, blocks: int, a: Any, b: Any, *how: Any, out_shape: Any) -> int:
    """What FlopCounterMode counts: two for each row and number of a kept block."""
    shapes = a, b, out_shape
    return 2 * prod(shapes[rows][:-1]) * prod(shapes[blocks])


def _fake(shape: Callable[..., Any], a: Any, *of: Any) -> Any:
    return a.new_empty(shape(a, *of))


# Of the tensors and how = layout, rows, columns, size, precision; on a GPU in the memory of `out`.


def _product(transposed: bool, x: Any, w: Any, *how: Any, out: Any = None) -> Any:
    """x @ w, or x @ w.T."""
    layout, rows, columns, _, precision = how
    kept = matrix(w, layout, rows, columns)
    kept = kept.T if transposed else kept
    return given_back(ops.matmul(lent(x, "x"), kept, out=out, precision=precision), x)


def _sddmm(x: Any, y: Any, *how: Any, out: Any = None) -> Any:
    x, y = (a if a.dim() == 2 else a.reshape(-1, a.shape[-1]) for a in (x, y))
    (layout, _, _, size, precision), x_, y_ = how, array_of(x, "x"), lent(y, "y")
    if out is not None:
        return ops.sddmm_into(out, x_.T, y_, layout_of(layout), precision=precision)
    s = ops.sddmm(x_.T, y_, layout_of(layout), block_size=size, precision=precision)
    return given_back(s.values, x)


def _of_y(x: Any, w: Any, *how: Any) -> Any:
    return *x.shape[:-1], how[2]  # a number is refused later


def _of_x(y: Any, w: Any, *how: Any) -> Any:
    return *y.shape[:-1], how[1]


def of_blocks(x: Any, y: Any, *how: Any) -> Any:
    """The shape of values."""
    return layout_of(how[0]).n_blocks, how[3], how[3]


def check_dense(argument: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{argument} takes a tensor of torch, got {type_name(x)}")
    if x.layout is not torch.strided or x.is_nested:
        got = f"one of {x.layout}: see .to_dense()"
        if x.is_nested:
            got = "a nested one: see torch.nested.to_padded_tensor"
        raise TypeError(f"{argument} takes a dense tensor, got {got}")


def check_alike(first: str, a: torch.Tensor, second: str, b: torch.Tensor) -> None:
    if a.device != b.device:
        raise ValueError(f"{first} and {second} take one device, got {a.device} and {b.device}")
    if a.dtype != b.dtype and not (
        {a.dtype, b.dtype} <= CODES.keys() and torch.is_autocast_enabled(a.device.type)
    ):
        raise TypeError(f"{first} and {second} take one dtype, got {a.dtype} and {b.dtype}")


def _check(side: int) -> Callable[..., None]:
    """Refuse what is no operand of a product; `side` says where its features stand."""

    def check(x: Any, w: Any, how: Any) -> None:
        check_dense("x", x)
        if x.dim() == 0 or x.shape[-1] != how[side]:
            raise ValueError(
                f"x takes the shape (..., {how[side]}) with this w, got {tuple(x.shape)}"
            )
        check_alike("x", x, "w", w)

    return check


matmul, transposed, sddmm = family(
    "matmul matmul_transposed sddmm",
    "int rows, int columns, int block_size",
    (partial(_product, False), partial(_product, True), _sddmm),
    (_of_y, _of_x, of_blocks),
    lambda product, *of: product(*of),  # which takes any number of axes before the features
    (
        {"shape": _of_y, "check": _check(1)},
        {"shape": _of_x, "check": _check(2)},
        {"shape": of_blocks},
    ),
)
