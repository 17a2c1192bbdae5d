"""An operator of torch, and what it costs to call: round torch's dispatcher where that is plain.

The dispatcher takes 4 us a call. For tensors of its own, in no mode, it would only record the
gradient, and `torch.autograd.Function` does that in as long.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from numbsparse.device import current_stream
from numbsparse.device.streams import of_torch
from numbsparse.device.torch_tensors import raw_stream

DEVICES = ("cpu", "cuda")
TYPES = (torch.Tensor, torch.nn.Parameter)
_dispatch_keys: Any = torch._C._dispatch_keys
_keys_of_thread: Any = torch._C._dispatch_tls_local_include_set
_is_autocast: Any = torch._C._is_any_autocast_enabled
_modes: Any = torch._C._len_torch_function_stack
_is_profiled: Any = torch._C._autograd._profiler_enabled
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
    again: Callable[..., Any] | None = None,
    check: Callable[..., None] = lambda *inputs: None,
) -> Any:
    """Define an operator, of whose arguments the first `tensors` are tensors.

    `save(ctx, tensors, rest, output)` keeps what `backward(ctx, *gradients)` takes, which gives the
    gradients of the tensors, and None. Under autocast the tensors are cast to its dtype, but those
    numbered in `wide` to float32, and all of them on a CPU that the operator takes no 16-bit floats
    on. `registered` is the kernel for the dispatcher, if that is another one.

    What is returned takes the tensors and then the rest, in a tuple; and so do the following.
    `check` refuses what does not fit. `again`, of tensors on a GPU, gives memory for the result,
    and whether the result is there already, because these tensors came before: then they were
    checked; else the kernel takes that memory as its last argument.
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

    def computed(of: Any, rest: Any, out: Any = None) -> Any:
        check(*of, rest)
        plain = _plain_keys(on_gpu := of[0].is_cuda)
        for a in of:
            if _dispatch_keys(a).raw_repr() != plain:
                return dispatched(of, rest)
        return kernels[on_gpu](*of, *rest) if out is None else kernels[on_gpu](*of, *rest, out)

    def dispatched(of: Any, rest: Any, out: Any = None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return made(*of, *rest)

    # What torch's register_autograd would make takes 15 us more a call.
    def recorded(run: Callable[..., Any]) -> Any:
        def forward(ctx: Any, *inputs: Any) -> Any:
            rest, out, is_there = inputs[-1]
            output = out if is_there else run(inputs[:-1], rest, out)
            save(ctx, inputs[:-1], rest, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(name, (torch.autograd.Function,), methods)

    # Function.apply looks for transforms of functions first, which plain tensors have none of.
    apply = super(torch.autograd.Function, recorded(computed)).apply
    differentiate = recorded(dispatched).apply

    def call(*inputs: Any) -> Any:
        of, rest = inputs[:-1], inputs[-1]
        if is_compiling() or not _is_plain(of):
            check(*inputs)
            return made(*of, *rest)
        out, is_there = None, False
        if again is not None and of[0].is_cuda:
            out, is_there = again(*inputs)
        if _is_recorded(of):
            return apply(*of, (rest, out, is_there))
        return out if is_there else computed(of, rest, out)

    def differentiated(*inputs: Any) -> Any:
        of, rest = inputs[:tensors], inputs[tensors:]
        if _is_recorded(of):
            return differentiate(*of, (rest, None, False))
        return dispatched(of, rest)

    _library.impl(name, differentiated, "Autograd")
    return call


def _is_recorded(tensors: Any) -> bool:
    if is_grad_enabled():
        for a in tensors:
            if a.requires_grad:
                return True
    return forward_ad._current_level >= 0  # where a Function without a rule for it says so


def _is_plain(tensors: Any) -> bool:
    """Whether the dispatcher would at most record gradients: own types, no autocast, no mode.

    What else it might do with an odd tensor only that one's keys tell.
    """
    for a in tensors:
        if type(a) not in TYPES:
            return False
    return (
        _keys_of_thread().raw_repr() in _PLAIN
        and not _is_autocast()
        and not _modes()
        and not _is_profiled()  # and shown what the dispatcher calls
    )


def _in_new_thread(look: Callable[[], int]) -> int:
    """What the dispatcher knows where no mode is on."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result()


@torch.inference_mode()
def _keys_in_inference() -> int:
    return int(_keys_of_thread().raw_repr())


_PLAIN = {_in_new_thread(lambda: _keys_of_thread().raw_repr()), _in_new_thread(_keys_in_inference)}


@cache
def _plain_keys(on_cuda: bool) -> int:
    """Those of a tensor that is nothing but a tensor."""
    device = DEVICES[on_cuda]
    return _in_new_thread(lambda: _dispatch_keys(torch.empty(0, device=device)).raw_repr())


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
