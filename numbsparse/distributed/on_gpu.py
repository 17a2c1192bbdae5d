"""Collectives on DeviceArrays by NCCL, on the current stream: captured there in graphs too."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from numbsparse import device
from numbsparse.device import DeviceArray
from numbsparse.distributed.links import Links

# NCCL's numbers of dtypes and operations (ncclDataType_t, ncclRedOp_t), which do not change.
DTYPES = {
    **{"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5},
    **{"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9},
}
ABORTED = 2.0  # seconds to wait for it
OPERATIONS = {"sum": 0, "max": 2, "min": 3, "mean": 4}


def is_installed() -> bool:
    return find_spec("nccl") is not None


def version() -> str:
    """Of NCCL's library; RuntimeError where it is not found."""
    from nccl.bindings import nccl

    try:
        number = nccl.get_version()
    except Exception as error:  # of cuda.pathfinder, one type a version
        raise RuntimeError(
            f"NCCL's library was not found ({error}): pip install nvidia-nccl-cu13, or -cu12"
        ) from None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class ByNCCL:
    """NCCL's communicator of all ranks, each with a GPU of its own.

    The low-level binding is called: the other one looks for torch at each call.
    """

    name = "nccl"

    def __init__(self, links: Links):
        from nccl.bindings import nccl

        device.compute_capability()  # makes the card the current one
        self._nccl = nccl
        own = bytes(nccl.get_unique_id()).hex() if links.rank == 0 else ""
        name = bytearray.fromhex(links.share(own)[0])
        try:
            self._comm = nccl.comm_init_rank_scalable(links.size, links.rank, 1, name, 0)
        except nccl.NCCLError as error:
            raise RuntimeError(f"NCCL did not start on rank {links.rank}: {error}") from error

    def all_reduce(self, x: DeviceArray, op: str, out: DeviceArray) -> None:
        self._run("all_reduce", x, out, x.size, DTYPES[x.dtype.name], OPERATIONS[op])

    def broadcast(self, x: DeviceArray, root: int, out: DeviceArray) -> None:
        self._run("broadcast", x, out, x.nbytes, DTYPES["uint8"], root)

    def all_gather(self, x: DeviceArray, out: DeviceArray) -> None:
        self._run("all_gather", x, out, x.nbytes, DTYPES["uint8"])

    def reduce_scatter(self, x: DeviceArray, op: str, out: DeviceArray) -> None:
        self._run("reduce_scatter", x, out, out.size, DTYPES[x.dtype.name], OPERATIONS[op])

    def _run(self, name: str, x: DeviceArray, out: DeviceArray, *how: int) -> None:
        """On the stream to work on, where the arrays are in order."""
        device.in_use(x, out)
        where = self._stream or device.working_stream()
        getattr(self._nccl, name)(x.address, out.address, *how, self._comm, where)

    _stream = 0

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Within this context work goes to a stream beside the current one."""
        self._stream = stream.handle
        try:
            yield
        finally:
            self._stream = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Collectives within this context are launched as one, at its end."""
        self._nccl.group_start()
        try:
            yield
        finally:
            self._nccl.group_end()

    def abort(self) -> None:
        """Let no kernel of this process wait for others any more.

        NCCL would wait for captured steps, which may live as long as the program: not we for it.
        """
        aborted = threading.Thread(target=self._abort, daemon=True)
        aborted.start()
        aborted.join(ABORTED)

    def _abort(self) -> None:
        with suppress(Exception):  # the program's own error is the one to see
            self._nccl.comm_abort(self._comm)
