"""Group: the processes that train together, and what they compute together."""

import atexit
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from numbsparse import device, edits
from numbsparse.device import DeviceArray
from numbsparse.device.shared import let_go
from numbsparse.distributed.links import Links, RankLost
from numbsparse.distributed.on_gpu import DTYPES, ByNCCL
from numbsparse.distributed.on_host import OPERATIONS, ByMPI, BySockets, call
from numbsparse.distributed.rendezvous import met
from numbsparse.ops.elementwise import gapless
from numbsparse.ops.operands import check_form, check_written, operand
from numbsparse.patterns.checks import integer, word


class Group:
    """All processes that a launcher started, of which this is number `rank` of `size`: see `init`.

    All ranks call the same methods in the same order. Arrays are NumPy arrays, DeviceArrays, or
    what shares its memory with one; a result is a new array in the same place, or `out`, which is
    C-contiguous and may be x itself. All ranks get the same bits.

    With the backend "nccl" collectives of DeviceArrays go to the current stream, wait for nothing
    on the host, and are part of what `numbsparse.graph` captures. All others are over when they
    return.

    Attributes
    ----------
    rank, size, local_rank : int
        The last is the rank among those of this host.
    backend : "nccl", "mpi", "sockets", or "alone" for one process

    Raises
    ------
    ValueError
        On all ranks, where they do not call the same with the same dtypes and shapes: by NCCL and
        MPI that is looked at in the first call of each kind.
    RankLost
        Where another rank has ended: killed, out of memory, or by an error.

    Examples
    --------
    >>> import numpy as np
    >>> import numbsparse.distributed as dist
    >>> with dist.init() as group:  # of one process, unless a launcher started several
    ...     total = group.all_reduce(np.ones(2))
    >>> group.rank, group.size, total
    (0, 1, array([1., 1.]))
    """

    def __init__(self, rank: int, size: int, local_rank: int, links: Any, host: Any, nccl: Any):
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._links: Links = links  # None for one process
        self._host, self._nccl = host, nccl
        self._agreed: set[str] = set()
        self._parts: list[Group] = []
        self._waiting: list[Any] = []  # flags that kernels here wait for
        self._is_open, self._process = size > 1, os.getpid()
        if size > 1:
            atexit.register(self._at_exit)

    @property
    def backend(self) -> str:
        engine = self._nccl or self._host
        return "alone" if engine is None else engine.name

    def all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
        """The "sum", "mean", "max" or "min" over the ranks, x.shape, on all of them.

        float16 and bfloat16 are summed in float32 on the host, in their own digits by NCCL.
        """
        x = self._numbers(x, op)
        return self._run("all_reduce", x, x, (op,), out, x.shape)

    def broadcast(self, x: Any, root: int = 0, out: Any = None) -> Any:
        """Rank `root`'s x on all of them; the others' say its shape and dtype, any but objects."""
        integer("root", root, least=0, most=self.size - 1)
        x = _plain(x)
        return self._run("broadcast", x, x, (root,), out, x.shape)

    def all_gather(self, x: Any, out: Any = None) -> Any:
        """All ranks' x (n, ...) one after the other, (size * n, ...), on all of them."""
        x = _plain(x)
        first, *rest = x.shape or (1,)
        return self._run("all_gather", x, x, (), out, (self.size * first, *rest))

    def reduce_scatter(self, x: Any, op: str = "sum", out: Any = None) -> Any:
        """Of `all_reduce(x, op)`, x (size * n, ...), this rank's part: (n, ...)."""
        x = self._numbers(x, op)
        first, *rest = x.shape or (1,)
        if not x.shape or first % self.size:
            raise ValueError(
                f"x takes a multiple of {self.size} along its first axis, got {x.shape}"
            )
        shape = (first // self.size, *rest)
        return self._run("reduce_scatter", x, x.reshape((self.size, *shape)), (op,), out, shape)

    def barrier(self) -> None:
        """Wait, on the host, until all ranks are here."""
        if self._links:
            self._links.meet({"call": "barrier"})

    def share(self, value: Any, call: str = "share") -> list[Any]:
        """A list with each rank's value: numbers, strings, None, and lists and dicts of them.

        `call` is what to say of it, where other ranks call something else.
        """
        return self._links.share(value, call) if self._links else [value]

    def split(self, color: int) -> "Group":
        """The group of those ranks that give the same color, numbered in their order here.

        All ranks call it. What one part computes waits for no other: a layer split over the ranks
        of one part, say, beside `DataParallel` over the ranks that have the same share of it. A
        part is closed with this group, or before.

        >>> import numbsparse.distributed as dist
        >>> with dist.init() as group:  # of 4 ranks: 0 and 1 split a layer, as do 2 and 3
        ...     beside, alike = group.split(group.rank // 2), group.split(group.rank % 2)
        >>> beside.size, alike.size
        (1, 1)

        MPI_Comm_split of the MPI standard; ncclCommSplit.
        """
        integer("color", color, least=0)
        colors = self.share(color)
        ranks = [rank for rank, other in enumerate(colors) if other == color]
        by_mpi = isinstance(self._host, ByMPI)
        world = self._host.world.Split(color, self.rank) if by_mpi else None

        def tell(where: Any) -> Any:  # of all parts at once
            return self.share(where)[ranks[0]]

        if len(ranks) == 1:
            tell(None)
            return Group(0, 1, self.local_rank, None, None, None)
        rank, size = ranks.index(self.rank), len(ranks)
        links = met(rank, size, {"the ranks": ranks}, 10.0, tell)
        links.is_part_of(self._links, ranks)
        host = ByMPI(links, world) if by_mpi else BySockets(links)
        nccl = ByNCCL(links) if self._nccl else None
        self._parts.append(Group(rank, size, self.local_rank, links, host, nccl))
        return self._parts[-1]

    def together(self) -> AbstractContextManager[None]:
        """Within this context collectives by NCCL are launched as one, at its end: for small ones.

        Their results may be used after it.
        """
        return self._nccl.together() if self._nccl else nullcontext()

    def close(self) -> None:
        """Leave: wait until the GPU and the other ranks are done. `with` does it at its end."""
        if self._is_to_leave() and self._nccl:
            self._begin_pass("ended its program")
            device.synchronize()
            self.barrier()
        self._leave("")

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._leave(_failed(error))
            if isinstance(error, RankLost):  # which is not this program's fault
                sys.exit(f"{error}; rank {self.rank} ends")

    def _is_to_leave(self) -> bool:
        """Not by a process that was forked from a rank, which goes on."""
        return self._is_open and self._process == os.getpid()

    def _leave(self, failed: str) -> None:
        for part in self._parts:
            part._leave(failed)
        if self._is_to_leave():
            self._is_open = False
            atexit.unregister(self._at_exit)
            self._links.close(failed)
            if self._nccl and failed:
                for flags in self._waiting:
                    let_go(flags)
                self._nccl.abort()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self._leave(_failed(error) if error is not None else "")

    def _numbers(self, x: Any, op: str) -> Any:
        """x, of a dtype that can be combined this way."""
        word("op", op, OPERATIONS)
        x = _plain(x)
        if x.dtype.name not in DTYPES or (op == "mean" and x.dtype.kind in "iu"):
            takes = [n for n in DTYPES if op != "mean" or "float" in n]
            raise TypeError(f"x takes {', '.join(takes)} for {op!r}, got {x.dtype}")
        return x

    def _run(
        self, name: str, x: Any, parts: Any, how: tuple[Any, ...], out: Any, shape: tuple[int, ...]
    ) -> Any:
        """A collective; `parts` is x as the engines take it, shape that of the result."""
        on_gpu = isinstance(x, DeviceArray)
        target = None if out is None else _checked_out(out, x, shape)
        if self._links:
            self._links.check()
        with device.in_order_with(x):
            if target is None:
                target = (device.empty if on_gpu else np.empty)(shape, x.dtype)
            if self._nccl and on_gpu:
                self._agree(call(name, x, *map(str, how)))
                if x.size:
                    getattr(self._nccl, name)(parts, *how, target)
            elif on_gpu and not device.SIMULATED:
                device.refill(target, self._on_host(name, parts.numpy(), how).reshape(shape))
            else:  # in the simulator in a captured step too, as by NCCL
                host, into = map(device.simulated, (parts, target)) if on_gpu else (parts, target)
                into[...] = self._on_host(name, host, how).reshape(shape)
        if out is None:
            return target
        edits.note(target, name)
        return out

    def _on_host(self, name: str, x: np.ndarray, how: tuple[Any, ...]) -> np.ndarray:
        if self._host is None:  # one process
            return x
        if self.backend == "mpi":
            self._agree(call(name, x, *map(str, how)))
        result: np.ndarray = getattr(self._host, name)(x, *how)
        return result

    def _begin_pass(self, why: str = "") -> None:
        """See `Links.begin_pass`; of a captured step, before each launch."""

        def begin() -> np.ndarray:
            self._links.begin_pass(why)
            return np.empty(0)

        if self._links:
            device.live(begin, 0, "uint8") if device.is_capturing() and not why else begin()

    def _agree(self, about: dict[str, Any]) -> None:
        """See that all ranks call the same, where the engine does not, the first time."""
        if (key := str(about)) not in self._agreed:
            self._links.meet(about)
            self._agreed.add(key)


def _plain(x: Any) -> Any:
    """x as a C-contiguous array of plain values."""
    x = operand(x, "x")
    if x.dtype.hasobject:
        raise TypeError(f"x takes numbers, got {x.dtype}")
    return gapless(x)


def _checked_out(out: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """`out` as an array, if the result can be written there."""
    target = operand(out, "out")
    if isinstance(target, DeviceArray) != isinstance(x, DeviceArray):
        raise ValueError("out takes an array in the place of x")
    check_form("out", target, shape, x.dtype)
    check_written("out", target)
    return target


def _failed(error: BaseException) -> str:
    if isinstance(error, RankLost):
        return f"ended too: {error}"
    if isinstance(error, SystemExit):
        return f"ended with {error.code}"
    return f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
