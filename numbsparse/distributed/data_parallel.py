"""Data parallel training: each rank has the whole model and a part of the batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from numbsparse import device, nn
from numbsparse.autograd import Tensor
from numbsparse.autograd.reducers import reducers
from numbsparse.block_sparse import BlockSparse
from numbsparse.distributed.buckets import Bucket, Work, buckets_of
from numbsparse.distributed.group import Group
from numbsparse.dtypes import check_kind
from numbsparse.layout import layout_of
from numbsparse.nn import kept
from numbsparse.ops.elementwise import copy_into, gapless
from numbsparse.patterns.checks import integer

BUCKET = 2**23  # bytes of gradients that are reduced together


class DataParallel:
    """Let `backward` give all ranks the mean of their gradients, that of the whole batch.

    Each rank has the model and an equal part of the batch, and its loss is a mean over that part.
    `loss.backward()` then sums the gradients of kept blocks over the ranks, in buckets, while it
    still works on those before; optimizers, clipping and loss scaling see the same numbers on every
    rank, and take the same step. The model is used, saved and loaded as without this.

    At first all ranks take the layouts and values of rank 0: parameters, buffers and saved numbers;
    so an optimizer, which keeps arrays for the blocks of a layout, is made after this. Dropout
    draws other masks on each rank from then on; what else a program draws at random for its part of
    the batch, it seeds with its rank, as by `numpy.random.default_rng((seed, group.rank))`.

    Parameters
    ----------
    model : Module
        Where it will stay: on the GPU already, if it is to be trained there.
    group : Group
    bucket : int
        Bytes of gradients that are reduced at a time.

    Raises
    ------
    ValueError
        On all ranks, where one has another model: parameters of other names, dtypes, shapes or
        block sizes. In `backward` where all have set other layouts, or it does not reach the same
        parameters on all.
    RankLost
        In `backward`, where another rank has ended, or has set a layout and this one has not.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> import numbsparse.distributed as dist
    >>> with dist.init() as group:
    ...     model = ns.nn.Linear(8, 4, block_size=4, seed=0)
    ...     parallel = dist.DataParallel(model, group)
    ...     y = parallel(np.ones((2, 8), np.float32))  # model(...) is the same
    ...     y.sum().backward()
    >>> model.weight.grad.shape
    (8, 4)

    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """

    def __init__(self, model: nn.Module, group: Group, *, bucket: int = BUCKET):
        check_kind("model", model, nn.Module, "a numbsparse Module")
        check_kind("group", group, Group, "a numbsparse Group")
        self.model, self.group, self.bucket = model, group, integer("bucket", bucket)
        named = list(model.named_parameters())
        self._names, self._parameters = [n for n, _ in named], [p for _, p in named]
        self._number = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._orders: dict[tuple[int, ...], list[int]] = {}  # by the parameters that are trained
        self._buckets: dict[tuple[int, ...], list[Bucket]] = {}
        self._work: Work | None = None
        self._layouts: list[Any] = []
        self._syncs = True
        self._beside = device.beside() if group._nccl else None
        self._take_layouts_of_rank_0()
        self.check()
        self._take_values_of_rank_0()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.stream = group.rank
        for parameter in self._parameters if group.size > 1 else ():
            reducers[parameter] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context `backward` adds up the gradients of this rank alone.

        The first one after it reduces them all: for batches in several parts.
        """
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def check(self) -> None:
        """See that all ranks have the same parameters, dtypes and layouts; ValueError if not.

        By itself it is done at first, and in a `backward` after a layout has changed.
        """
        self._layouts = list(map(_layout_of, self._parameters))
        self._buckets.clear()
        own = {n: _about(p) for n, p in zip(self._names, self._parameters, strict=True)}
        first, *others = self.group.share(own, "DataParallel.check")
        for rank, theirs in enumerate(others, 1):
            for name in first | theirs:
                if first.get(name) != theirs.get(name):
                    words = [of[name][0] if name in of else "none" for of in (theirs, first)]
                    other = " of another layout" if words[0] == words[1] else ""
                    raise ValueError(
                        f"rank {rank} has another model: {name} is {words[0]}{other}, where rank 0 "
                        f"has {words[1]}"
                    )

    def _take_layouts_of_rank_0(self) -> None:
        """Of matrices of the same features and block size; what else differs `check` refuses."""
        matrices = [p for p in self._parameters if isinstance(p._data, BlockSparse)]
        data: list[Any] = [p.data for p in matrices]
        layouts = [w.layout for w in data]
        own = [[*a.shape, w.block_size] for a, w in zip(layouts, data, strict=True)]
        first, *others = self.group.share(own)
        if any(theirs != first for theirs in others):
            return
        words = self.group.share([[a.word, a.n_blocks] for a in layouts])
        for parameter, w, layout, *of in zip(matrices, data, layouts, *words, strict=True):
            if any(other != of[0] for other in of):
                is_first = self.group.rank == 0
                blocks = layout.flat_indices if is_first else np.empty(of[0][1], np.int64)
                parameter.data = w.remap(layout_of(layout.shape, self.group.broadcast(blocks)))

    def _take_values_of_rank_0(self) -> None:
        tensors = [*self._parameters, *self.model.buffers()]
        for tensor in tensors if self.group.size > 1 else ():
            values = tensor.values
            of_0 = gapless(values)  # of a buffer, which may have gaps, a copy
            self.group.broadcast(of_0, out=of_0)
            if of_0 is not values:
                copy_into(values, of_0)
        for module in self.model.modules():
            numbers = {name: getattr(module, name) for name in module.saved}
            if numbers and self.group.size > 1:
                vars(module).update(self.group.share(numbers)[0])

    def ready(self, leaf: Tensor, total: Tensor) -> Tensor:
        """The mean that takes the place of this rank's gradient; its values come by `finish`."""
        if not self._syncs:
            return total
        work, i, data = self._begun(), self._number[id(leaf)], total.data
        work.found[i] = gapless(data.values if isinstance(data, BlockSparse) else data)
        mean = work.mean_of(i, work.found[i])
        for values, of_all in work.complete():
            self._reduce(values, of_all)
        return Tensor(data.with_values(mean) if isinstance(data, BlockSparse) else mean)

    def parts(self, leaf: Tensor) -> Callable[[Any, int, int], None] | None:
        """Reduces a gradient of two buckets or more part after part, if it is next in order.

        One that is added to another is reduced whole.
        """
        if not self._syncs or leaf.grad is not None or leaf.values.nbytes < 2 * self.bucket:
            return None
        work, i = self._begun(), self._number[id(leaf)]
        if (bucket := work.next()) is None or bucket.numbers != (i,):
            return None

        def done(values: Any, first: int, last: int) -> None:
            work.in_parts[i] = values
            self._reduce(values[first:last], work.mean_of(i, values)[first:last])

        return done

    def finish(self) -> None:
        """Let the current stream wait for all that is being reduced."""
        if (work := self._work) is None:
            return
        try:
            if work.buckets is None:
                order, *others = self.group.share(list(work.found))  # that of rank 0 is everyone's
                for rank, theirs in enumerate(others, 1):
                    self._refuse(order, theirs, rank, "unlike on rank 0")
                self._orders[work.trained] = order
                for i in order:
                    self._reduce(work.found[i], work.means[i])
            else:
                self._refuse(work.of, work.found, self.group.rank, "unlike before")
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Drop what a `backward` began to reduce, as one that failed does."""
        work, self._work = self._work, None
        if work and self._beside:
            device.order(self._beside.handle, device.working_stream())

    def _begun(self) -> Work:
        """The work of this `backward`."""
        if self._work is None:
            layouts = list(map(_layout_of, self._parameters))
            set_anew = any(a is not b for a, b in zip(layouts, self._layouts, strict=True))
            self.group._begin_pass("set a layout" if set_anew else "")
            if set_anew:
                self.check()
            trained = tuple(i for i, p in enumerate(self._parameters) if p.requires_grad)
            if trained in self._orders and trained not in self._buckets:
                arrays = [p.values for p in self._parameters]
                self._buckets[trained] = buckets_of(self._orders[trained], arrays, self.bucket)
            self._work = Work(trained, self._buckets.get(trained))
        return self._work

    def _refuse(self, usual: Any, found: Any, rank: int, words: str) -> None:
        """Raise ValueError where a rank found other gradients than is usual."""
        if odd := set(usual) ^ set(found):
            has = "" if min(odd) in found else "not "
            raise ValueError(
                f"backward did {has}reach {self._names[min(odd)]} on rank {rank}, {words}: all "
                "ranks reach the same parameters each time, or freeze the others"
            )

    def _reduce(self, values: Any, mean: Any) -> None:
        """Start the reduction, after all work so far."""
        if self._beside:
            device.order(device.working_stream(), self._beside.handle)
        nccl = self.group._nccl
        with nccl.on(self._beside) if nccl else nullcontext():
            self.group.all_reduce(values, "mean", out=mean)


def _layout_of(parameter: Tensor) -> Any:
    data = parameter._data
    return data.stored_layout if isinstance(data, BlockSparse) else None


def _about(parameter: Tensor) -> list[str]:
    """What ranks compare of a parameter: a description in words, and a digest of its layout."""
    form = kept.form_of(parameter._data)
    return [f"{parameter.dtype}, {form}", "" if form.layout is None else form.layout.word]
