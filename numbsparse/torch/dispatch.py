"""An operator of torch, and what it costs to call: round torch's dispatcher where that is plain.

The dispatcher takes 4 us a call. For tensors of its own, in no mode, it would only record the
gradient, and `torch.autograd.Function` does that in as long.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import is_grad_enabled
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from numbsparse.device import current_stream
from numbsparse.device.streams import of_torch
from numbsparse.device.torch_tensors import raw_stream
from numbsparse.torch.kinds import Kinds, by_dispatcher, kind_of, new_kind, started

DEVICES = ("cpu", "cuda")
TYPES = (torch.Tensor, torch.nn.Parameter)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # which torch.autocast casts
_dispatch_keys: Any = torch._C._dispatch_keys
_keys_of_thread: Any = torch._C._dispatch_tls_local_include_set
_is_autocast: Any = torch._C._is_any_autocast_enabled
_modes: Any = torch._C._len_torch_function_stack
_is_profiled: Any = torch._C._autograd._profiler_enabled
_library = torch.library.Library("numbsparse", "DEF")
_keys: Any = torch._C.DispatchKey
_AUTOCAST = torch._C.DispatchKeySet(_keys.AutocastCPU) | torch._C.DispatchKeySet(_keys.AutocastCUDA)


def operator(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any],
    save: Callable[..., Any],
    tensors: int,
    jvp: Callable[..., Any] | None = None,
    wide: tuple[int, ...] = (),
    half_on_cpu: bool = True,
    registered: Callable[..., Any] | None = None,
    shape: Callable[..., Any] | None = None,
    check: Callable[..., None] = lambda *inputs: None,
) -> Any:
    """Define an operator, of whose arguments the first `tensors` are tensors.

    `save(ctx, tensors, rest, output)` keeps what `backward(ctx, *gradients)` takes, which gives the
    gradients of the tensors, and None. `jvp(ctx, *tangents)` gives the result's, of tensors that
    ctx.saved_tensors has. Under autocast the tensors are cast to its dtype, but those
    numbered in `wide` to float32, and all of them on a CPU that the operator takes no 16-bit floats
    on. `registered` is the kernel for the dispatcher, if that is another one. With the `shape` of
    its result, of all arguments, the kernel's launches on a GPU are started again: see `started`.

    What is returned takes the tensors, in a tuple, and the rest, in another one; `check` takes the
    tensors one by one, and refuses what does not fit.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    made = getattr(torch.ops.numbsparse, name).default
    registered = registered or kernel
    again: Any = None if shape is None else started(kernel, shape)
    kernels = kernel, in_order(kernel)
    kinds: Kinds = {}
    of_gpu = in_order(registered) if again is None else by_dispatcher(again, tensors)
    for device, of_device in zip(DEVICES, (registered, of_gpu), strict=True):
        _library.impl(name, of_device, device.upper())
    torch.library.register_fake(f"numbsparse::{name}", fake, lib=_library)

    def computed(of: Any, rest: Any) -> Any:
        return kernels[of[0].is_cuda](*of, *rest)

    def dispatched(of: Any, rest: Any) -> Any:
        levels = torch._C._are_functorch_transforms_active()  # those below record for themselves
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.set_grad_enabled(levels or is_grad_enabled()),
            forward_ad._set_fwd_grad_enabled(levels or torch._C._is_fwd_grad_enabled()),
        ):
            return made(*of, *rest)

    # What torch's register_autograd would make takes 15 us more a call.
    def recorded(compute: Callable[..., Any]) -> Any:
        def forward(ctx: Any, *inputs: Any) -> Any:
            of, (rest, output) = inputs[:-1], inputs[-1]
            if output is None:
                output = compute(of, rest)
            save(ctx, of, rest, output)
            if forward_ad._current_level >= 0:
                ctx.save_for_forward(*of)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        methods["_compiled_autograd_key"] = staticmethod(Function._compiled_autograd_key)
        if jvp is not None:
            methods["jvp"] = staticmethod(jvp)
        # Function.apply looks for transforms of functions first: this is within one, or in none.
        function: Any = type(name, (_SingleLevelFunction,), methods)
        return function.apply

    record, differentiate = recorded(computed), recorded(dispatched)

    def autocast(*inputs: Any) -> Any:
        of = _cast(inputs[:tensors], wide, half_on_cpu)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):  # within it autocast seems to be off
            return made(*of, *inputs[tensors:])

    def call(of: Any, rest: Any) -> Any:
        if _is_autocast() and isinstance(of[0], torch.Tensor):
            of = _cast(of, wide, half_on_cpu)
        odd = is_odd() or getattr(of[0], "is_nested", False)  # TensorGuards would end the process
        kind = None if odd else kind_of(kinds, of, rest)
        if kind is None:
            check(*of, rest)
            if odd or not is_plain(of):
                return made(*of, *rest)
            kind = new_kind(kinds, of, rest)
        output = None
        if again is not None and kind.device >= 0:
            output = again(kind, of, rest)
        if kind.is_recorded:
            return record(*of, (rest, output))
        return computed(of, rest) if output is None else output

    def differentiated(*inputs: Any) -> Any:
        of = inputs[:tensors]
        rest = tuple([tuple(a) if type(a) is list else a for a in inputs[tensors:]])
        if forward_ad._current_level >= 0 or (
            is_grad_enabled() and any(a.requires_grad for a in of)
        ):
            with enable_single_level_autograd_function():  # torch.func calls this for each level
                return differentiate(*of, (rest, None))
        return dispatched(of, rest)

    _library.impl(name, differentiated, "Autograd")
    for device in DEVICES:
        _library.impl(name, autocast, f"Autocast{device.upper()}")
    return call


def batched(name: str, fake: Callable[..., Any], joined: Callable[..., Any] | None) -> None:
    """What torch.vmap makes of an operator of two tensors: a call for each, one after the other.

    With `joined`, which takes the operator and its arguments, the batch of the first tensor in
    front, it is a single call where the second tensor is the same for all.
    """
    made = getattr(torch.ops.numbsparse, name).default

    def each(x: torch.Tensor, axis: int | None, count: int) -> Any:
        if axis is None:
            return [x] * max(count, 1)
        return x.unbind(axis) if count else [x.new_empty(x.movedim(axis, 0).shape[1:])]

    def rule(info: Any, axes: Any, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Any:
        if joined is not None and axes[1] is None:
            return joined(made, a.movedim(axes[0], 0), b, *rest), 0
        count = info.batch_size
        parts = zip(each(a, axes[0], count), each(b, axes[1], count), strict=True)
        if count:
            return torch.stack([made(*of, *rest) for of in parts]), 0
        return torch.stack([fake(*of, *rest) for of in parts])[:0], 0

    torch.library.register_vmap(f"numbsparse::{name}", rule, lib=_library)


def counted(name: str, operations: Callable[..., int]) -> None:
    """Let `torch.utils.flop_counter` know of an operator's operations, of the shapes of all."""
    register_flop_formula(getattr(torch.ops.numbsparse, name))(operations)


def is_odd() -> bool:
    """Whether a compiler, a mode, a profile or duals are to be shown what the dispatcher calls."""
    return is_compiling() or _modes() or _is_profiled() or forward_ad._current_level >= 0


def is_plain(tensors: Any) -> bool:
    """Whether the dispatcher would at most cast and record gradients: own types, and no mode."""
    plain = _plain_keys(tensors[0].is_cuda)
    return _keys_of_thread().raw_repr() in _PLAIN and all(
        type(a) in TYPES and _dispatch_keys(a).raw_repr() == plain for a in tensors
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


def _cast(of: Any, wide: tuple[int, ...], half_on_cpu: bool) -> Any:
    """What torch.autocast makes of tensors."""
    device = of[0].device.type
    if device not in DEVICES or not torch.is_autocast_enabled(device):
        return of
    narrow = torch.get_autocast_dtype(device)
    if device == "cpu" and not half_on_cpu:
        narrow = torch.float32
    dtypes = [torch.float32 if i in wide else narrow for i in range(len(of))]
    pairs = zip(of, dtypes, strict=True)
    return tuple([a.to(dtype) if a.dtype in FLOATS else a for a, dtype in pairs])


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
