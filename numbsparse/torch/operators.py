"""What all operators of this room have in common, and the products: torch.ops.numbsparse.*

An operator takes tensors, words and numbers, so that torch can trace it without running it. It has
a kernel, the same for CPU and CUDA tensors, and a fake one, which only says what comes out; its
gradient, made of other operators; and a rule for torch.autocast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from numbsparse import ops
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import current_stream, in_library_of
from numbsparse.device.streams import of_torch
from numbsparse.device.torch_tensors import raw_stream
from numbsparse.dtypes import bfloat16
from numbsparse.layout import Layout
from numbsparse.torch.handles import layout_of

DEVICES = ("cpu", "cuda")
TYPES = (torch.Tensor, torch.nn.Parameter)
_dispatch_keys: Any = torch._C._dispatch_keys
_keys_of_thread: Any = torch._C._dispatch_tls_local_include_set
CODES: dict[torch.dtype, Any] = {  # NumPy's dtypes; bfloat16, which it lacks, goes by its bits
    torch.float16: np.dtype("f2"),
    torch.bfloat16: np.dtype("u2"),
    torch.float32: np.dtype("f4"),
    torch.float64: np.dtype("f8"),
}

_library = torch.library.Library("numbsparse", "DEF")


def operator(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any],
    save: Callable[..., Any],
    tensors: int,
    wide: tuple[int, ...] = (),
    half_on_cpu: bool = True,
    registered: Callable[..., Any] | None = None,
) -> Any:
    """Define an operator, of whose arguments the first `tensors` are tensors.

    `save(ctx, inputs, output)` keeps what `backward(ctx, *gradients)` takes. Under autocast the
    tensors are cast to its dtype, but those numbered in `wide` to float32, and all of them on a CPU
    that the operator takes no 16-bit floats on. What is returned goes round torch's dispatcher,
    which takes 4 us a call, where that would only record the gradient; `registered` is the kernel
    for the dispatcher, if that is another one.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    made = getattr(torch.ops.numbsparse, name).default
    kernels = kernel, in_order(kernel)
    registered = registered or kernel
    for device, of_device in zip(DEVICES, (registered, in_order(registered)), strict=True):
        _library.impl(name, of_device, device.upper())
        rule = _autocast(made, device, tensors, wide if half_on_cpu or device != "cpu" else None)
        _library.impl(name, rule, f"Autocast{device.upper()}")
    torch.library.register_fake(f"numbsparse::{name}", fake, lib=_library)

    def is_recorded(inputs: tuple[Any, ...]) -> bool:
        if torch.is_grad_enabled():
            for a in inputs[:tensors]:
                if a.requires_grad:
                    return True
        return False

    def computed(*inputs: Any) -> Any:
        return kernels[inputs[0].is_cuda](*inputs)

    def dispatched(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return made(*inputs)

    # What torch.library.register_autograd would make takes 15 us more a call.
    def recorded(run: Callable[..., Any]) -> Any:
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run(*inputs)
            save(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(name, (torch.autograd.Function,), methods)

    # Function.apply looks for transforms of functions first, which plain tensors have none of.
    apply = super(torch.autograd.Function, recorded(computed)).apply
    differentiate = recorded(dispatched).apply

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_plain(inputs[:tensors]):
            return made(*inputs)
        return (apply if is_recorded(inputs) else computed)(*inputs)

    def differentiated(*inputs: Any) -> Any:
        return (differentiate if is_recorded(inputs) else dispatched)(*inputs)

    _library.impl(name, differentiated, "Autograd")
    return call


def _is_plain(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether torch's dispatcher would only record gradients: no autocast, mode or odd tensor."""
    on_cuda = tensors[0].is_cuda
    of_thread, of_tensor = _plain_keys(on_cuda)
    for a in tensors:
        if type(a) not in TYPES or _dispatch_keys(a).raw_repr() != of_tensor:
            return False
    return (
        _keys_of_thread().raw_repr() == of_thread
        and not torch.is_autocast_enabled(DEVICES[on_cuda])
        and not torch._C._len_torch_function_stack()
        and not torch.autograd._profiler_enabled()  # which shows what the dispatcher calls
    )


@cache
def _plain_keys(on_cuda: bool) -> tuple[int, int]:
    """What the dispatcher knows of a thread and of a tensor in no mode: those of a new thread."""

    def look() -> tuple[int, int]:
        tensor = torch.empty(0, device=DEVICES[on_cuda])
        return _keys_of_thread().raw_repr(), _dispatch_keys(tensor).raw_repr()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result()


def _autocast(
    made: Any, device: str, tensors: int, wide: tuple[int, ...] | None
) -> Callable[..., Any]:
    """The operator on tensors cast for torch.autocast; all are wide for None."""

    def run(*arguments: Any) -> Any:
        narrow = torch.get_autocast_dtype(device)
        dtypes = [torch.float32 if wide is None or i in wide else narrow for i in range(tensors)]
        cast = [
            a if a.dtype == torch.float64 else a.to(dtype)
            for a, dtype in zip(arguments, dtypes, strict=False)
        ]
        with torch.autocast(device, enabled=False):
            return made(*cast, *arguments[tensors:])

    return run


def in_order(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel on the stream that torch works on."""

    def run(first: torch.Tensor, *others: Any) -> Any:
        device = first.get_device()
        theirs = of_torch(raw_stream(torch)(device), device)
        if theirs.is_same(current_stream()):
            return kernel(first, *others)
        with theirs:
            return kernel(first, *others)

    return run


def lent(x: torch.Tensor) -> Any:
    """A tensor as operations take it: a NumPy array of the same memory, or itself on a GPU.

    torch's own .numpy() forbids to free the memory for good.
    """
    if x.is_cuda:
        return x
    size, strides, items = x.element_size(), None, x.numel()
    if not x.is_contiguous():
        strides = tuple(size * stride for stride in x.stride())
        items = items and sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    memory = _bytes(size * items).from_address(x.data_ptr())
    memory.tensor = x  # lives as long as the array
    array: Any = np.ndarray(tuple(x.shape), CODES[x.dtype], memory, 0, strides)
    return array.view(bfloat16()) if x.dtype == torch.bfloat16 else array


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


def matrix(values: torch.Tensor, layout: str, rows: int, columns: int) -> BlockSparse:
    """The matrix that values and the word for their layout say."""
    kept, size = layout_of(layout), values.shape[-1]
    if values.shape != (kept.n_blocks, size, size):
        raise ValueError(
            f"values takes the shape ({kept.n_blocks}, B, B) with this layout, "
            f"got {tuple(values.shape)}"
        )
    # As its constructor makes it, in a tenth of the time.
    w = BlockSparse.__new__(BlockSparse)
    w.values = ops.operand(lent(values.contiguous()), "values")
    w.stored_layout, w.shape, w.is_transposed = kept, (rows, columns), False
    return w


def family(names: str, numbers: str, kernels: Any, fakes: Any) -> tuple[Any, Any, Any]:
    """Define three operators closed under differentiation: y = f(x, w), x = t(y, w), w = s(x, y).

    Each is linear in both of its tensors, and its two gradients are the two others. w is the values
    of a matrix; after the tensors all three take the word for its layout, and then the `numbers`.
    """
    made: list[Any] = []

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.how, ctx.layout = inputs[2:], layout_of(inputs[2])  # which lives as long as the tape

    def of_both(ctx: Any, first: Any, second: Any) -> tuple[Any, ...]:
        found = [
            op(*given, *ctx.how) if needed else None
            for (op, *given), needed in zip((first, second), ctx.needs_input_grad, strict=False)
        ]
        return *found, *(None for _ in ctx.how)

    def of_f(ctx: Any, dy: Any) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        return of_both(ctx, (made[1], dy, w), (made[2], x, dy))

    def of_t(ctx: Any, dx: Any) -> tuple[Any, ...]:
        y, w = ctx.saved_tensors
        return of_both(ctx, (made[0], dx, w), (made[2], dx, y))

    def of_s(ctx: Any, dw: Any) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        return of_both(ctx, (made[1], y, dw), (made[0], x, dw))

    for name, kernel, fake, backward in zip(
        names.split(), kernels, fakes, (of_f, of_t, of_s), strict=True
    ):
        schema = f"{name}(Tensor a, Tensor b, str layout, {numbers}, str precision) -> Tensor"
        made.append(operator(schema, kernel, fake, save=save, backward=backward, tensors=2))
    return made[0], made[1], made[2]


def _on_gpu(
    name: str, layout: Layout, a: Any, b: Any, shape: Any, how: Any, work: Callable[[Any], Any]
) -> Any:
    """What `work(out)` writes of tensors on a GPU, in memory of torch's."""
    out = a.new_empty(shape)
    ops.replayed(layout, (name, how), (a, b, out), lambda: work(out))
    return out


def _matmul(x: Any, w: Any, layout: str, rows: int, columns: int, _: int, precision: str) -> Any:
    def product(out: Any) -> Any:
        return ops.matmul(lent(x), matrix(w, layout, rows, columns), out=out, precision=precision)

    if not x.is_cuda:
        return given_back(product(None), x)
    shape, how = (*x.shape[:-1], columns), (rows, columns, precision)
    return _on_gpu("matmul", layout_of(layout), x, w, shape, how, product)


def _transposed(
    y: Any, w: Any, layout: str, rows: int, columns: int, _: int, precision: str
) -> Any:
    def product(out: Any) -> Any:
        return ops.matmul(lent(y), matrix(w, layout, rows, columns).T, out=out, precision=precision)

    if not y.is_cuda:
        return given_back(product(None), y)
    shape, how = (*y.shape[:-1], rows), (rows, columns, precision)
    return _on_gpu("transposed", layout_of(layout), y, w, shape, how, product)


def _sddmm(x: Any, y: Any, layout: str, rows: int, columns: int, size: int, precision: str) -> Any:
    x, y = (a if a.dim() == 2 else a.reshape(-1, a.shape[-1]) for a in (x, y))
    kept = layout_of(layout)
    if not x.is_cuda:
        s = ops.sddmm(lent(x).T, lent(y), kept, block_size=size, precision=precision)
        return given_back(s.values, x)

    def product(out: Any) -> Any:
        ops.sddmm_into(out, ops.operand(x, "x").T, y, kept, precision=precision)

    shape, how = (kept.n_blocks, size, size), (rows, columns, precision)
    return _on_gpu("sddmm", kept, x, y, shape, how, product)


def of_blocks(x: Any, y: Any, layout: str, rows: int, columns: int, size: int, *how: Any) -> Any:
    """Values, as far as torch has to know them before they are there."""
    return x.new_empty((layout_of(layout).n_blocks, size, size))


matmul, transposed, sddmm = family(
    "matmul matmul_transposed sddmm",
    "int rows, int columns, int block_size",
    (_matmul, _transposed, _sddmm),
    (
        lambda x, w, layout, rows, columns, *how: x.new_empty((*x.shape[:-1], columns)),
        lambda y, w, layout, rows, *how: y.new_empty((*y.shape[:-1], rows)),
        of_blocks,
    ),
)
