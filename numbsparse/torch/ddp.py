"""torch's DDP, where one gradient is so large that nothing else hides its reduction."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import distributed
from torch.utils.weak import WeakTensorKeyDictionary

from numbsparse import ops
from numbsparse.nn.functional.lstm import SHARES
from numbsparse.torch.dispatch import in_order
from numbsparse.torch.handles import layout_of
from numbsparse.torch.operators import given_back, lent, matrix

_reducers: Any = WeakTensorKeyDictionary()  # of recurrent weights


def overlap_(model: Any) -> Any:
    """Let DDP reduce the gradient of an LSTM's recurrent weight while the rest of it is computed.

    DDP reduces a gradient when it is whole. This one is often most of the model, and the last to be
    there; it is now reduced in parts. What comes out is the same, within rounding. It is DDP's
    communication hook, so the model can have no other one.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        Best with `gradient_as_bucket_view=True`. NCCL gets multiprocessors beside a kernel that
        fills the GPU only where its stream comes first: `init_process_group(..., pg_options=
        torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True))`.

    Returns
    -------
    The model. Raises TypeError where it is no DDP.

    Examples
    --------
    >>> import numbsparse.torch as nst
    >>> lstm = nst.LSTM(32, 64)
    >>> nst.overlap_(lstm)
    Traceback (most recent call last):
    TypeError: model takes a DistributedDataParallel, got LSTM

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(f"model takes a DistributedDataParallel, got {type(model).__name__}")
    reducer = _Reducer(model)
    for name, weight in model.module.named_parameters():
        if name.rpartition(".")[2].startswith("weight_hh_l") and weight.dim() == 3:
            _reducers[weight] = _Of(weight, reducer)
    model.register_comm_hook(reducer, lambda state, bucket: state.hook(bucket))
    return model


def reducer_of(weight: torch.Tensor) -> _Of | None:
    """What makes this weight's gradient in parts; not of one that is added to another."""
    of = _reducers.get(weight) if _reducers else None
    if of is None or weight.grad is not None or not weight.requires_grad:
        return None
    model = of.reducer.model()
    return of if model is not None and model.require_backward_grad_sync else None


class _Of:
    """A weight, and who reduces its gradient."""

    def __init__(self, weight: torch.Tensor, reducer: _Reducer):
        self.id, self.reducer = id(weight), reducer
        self.works: list[Any] = []
        self.sent = 0  # where the values of the last gradient are
        weight.register_hook(self.found)

    def gradient(self, x: Any, dy: Any, how: Any) -> torch.Tensor:
        """sddmm(x, dy), which after `wait` is the mean of all ranks'."""
        made = in_order(self._gradient) if x.is_cuda else self._gradient
        gradient: torch.Tensor = made(x, dy, *how)
        self.sent = gradient.data_ptr()
        return gradient

    def _gradient(
        self, x: Any, dy: Any, layout: str, rows: int, columns: int, size: int, precision: str
    ) -> torch.Tensor:
        like = x.new_empty(layout_of(layout).n_blocks, size, size)
        a, b = (ops.operand(lent(a.reshape(-1, a.shape[-1])), "x") for a in (x, dy))

        def done(values: Any, first: int, last: int) -> None:
            self.works.append(self.reducer.start(given_back(values, x)[first:last]))

        w = matrix(like, layout, rows, columns)
        return given_back(ops.sddmm_in_parts(a.T, b, w, SHARES, done, precision).values, x)

    def wait(self) -> None:
        """Until the gradient is the mean; of a GPU, its stream."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def found(self, gradient: torch.Tensor) -> None:
        """The gradient is there: one that others were added to is to be reduced once more.

        The mean of equal ones is the same, so that is right.
        """
        if self.sent == gradient.data_ptr():
            self.reducer.reduced.add(self.id)
        self.sent = 0


class _Reducer:
    """The state of DDP's hook: which gradients are means of all ranks already."""

    def __init__(self, ddp: Any):
        self.model, self.group = ref(ddp), ddp.process_group  # weak, as are the keys above
        self.by_nccl = distributed.get_backend(self.group) == "nccl"
        self.reduced: set[int] = set()  # by the ids of parameters

    def start(self, values: torch.Tensor) -> Any:
        """The mean takes the place of the values, when what is returned is over."""
        op = distributed.ReduceOp.AVG
        if not self.by_nccl:
            op, values = distributed.ReduceOp.SUM, values.div_(self.group.size())
        return distributed.all_reduce(values, op, self.group, async_op=True)

    def hook(self, bucket: Any) -> Any:
        """What DDP calls for each bucket of gradients."""
        whole, ids = bucket.buffer(), [id(p) for p in bucket.parameters()]
        left = [g for i, g in zip(ids, bucket.gradients(), strict=True) if i not in self.reduced]
        works = [self.start(a) for a in ([whole] if len(left) == len(ids) else left)]
        self.reduced -= set(ids)
        if works:  # in order: with the last all are over
            return works[-1].get_future().then(lambda _: whole)
        done = torch.futures.Future()
        done.set_result(whole)
        return done
