"""Tensors that are alike, told by one look: for them an operator was checked and planned before.

The look is the guard by which torch.compile knows whether its code fits. It takes 0.3 us where
Python takes ten times as long to ask each tensor the same.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import is_grad_enabled
from torch._C._dynamo.guards import TensorGuards

from numbsparse import ops
from numbsparse.device import streams
from numbsparse.device.torch_tensors import new_empty, raw_stream
from numbsparse.layout import Index
from numbsparse.torch.handles import layout_of

KEPT = 4  # kinds of tensors, for the same words and numbers of an operator; the last ones
REMEMBERED = 1024  # such words and numbers, for an operator
_stream_of = raw_stream(torch)


class Kind:
    """What tensors have in common with those that made it, and what an operator does with them.

    Attributes
    ----------
    check : of tensors, whether they are such: of the same types, dtypes, shapes, strides, devices,
        and under the same transforms and modes of the dispatcher
    with_grad : whether torch's tape was on
    is_recorded : whether it is to record the operator
    device : the number of their GPU, -1 on a CPU
    shape : of the result, once it is known
    index : a weak reference to that of the layout on the GPU, likewise
    """

    __slots__ = ("check", "device", "index", "is_recorded", "shape", "with_grad")

    def __init__(self, of: Any) -> None:
        self.check = TensorGuards(*of, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.with_grad = is_grad_enabled()
        self.is_recorded = self.with_grad and any(a.requires_grad for a in of)
        self.device = of[0].get_device()
        self.shape: Any = None
        self.index: Callable[[], Index | None] = lambda: None


Kinds = dict[Any, list[Kind]]


def kind_of(kinds: Kinds, of: Any, rest: Any) -> Kind | None:
    """The kind of these tensors, if it is known for these words and numbers."""
    with_grad = is_grad_enabled()
    try:
        for kind in kinds.get(rest, ()):
            if kind.with_grad is with_grad and kind.check(*of):
                return kind
    except TypeError:  # a size that torch.compile traces as unknown has no hash
        pass
    return None


def new_kind(kinds: Kinds, of: Any, rest: Any) -> Kind:
    """Let it be known."""
    if len(kinds) >= REMEMBERED:
        kinds.clear()
    kind = Kind(of)
    kinds[rest] = [kind, *kinds.get(rest, ())][:KEPT]
    return kind


def by_dispatcher(again: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """`again` of a kind, as torch's dispatcher calls it: arguments in a row, numbers in lists."""
    kinds: Kinds = {}

    def run(*arguments: Any) -> Any:
        of, rest = arguments[:tensors], arguments[tensors:]
        rest = tuple([tuple(one) if isinstance(one, list) else one for one in rest])
        return again(kind_of(kinds, of, rest) or new_kind(kinds, of, rest), of, rest)

    return run


def started(kernel: Callable[..., Any], shape: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for two tensors of a kind on a GPU: its launches, where they are known.

    It takes memory for the result as `out`, of the `shape` of all arguments; the first one behind
    the tensors names a layout.
    """

    def run(kind: Kind, of: Any, rest: Any) -> Any:
        a, b = of
        if kind.shape is None:
            kind.shape = tuple(shape(*of, *rest))
        out = new_empty(a, kind.shape)
        stream = streams.of_torch(_stream_of(kind.device), kind.device)
        index, where = kind.index(), (kind, a.data_ptr(), b.data_ptr(), out.data_ptr())
        is_captured = streams.several and stream.is_captured
        if index is not None and not is_captured and ops.started(index.replays, where, stream):
            return out

        def work() -> None:
            with torch.no_grad(), stream:
                kernel(*of, *rest, out=out)

        index = layout_of(rest[0]).device_index
        if index is None or is_captured:
            work()
        else:
            kind.index = ref(index)
            ops.repeated(index.replays, where, stream, work)
        return out

    return run
