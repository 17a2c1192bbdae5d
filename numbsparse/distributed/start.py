"""How the processes of a launcher find each other."""

from threading import TIMEOUT_MAX
from typing import Any

import numpy as np

import numbsparse
from numbsparse import device
from numbsparse.distributed import on_gpu
from numbsparse.distributed.environment import (
    Process,
    address,
    process,
    store_of_torchrun,
    world_of_mpi,
)
from numbsparse.distributed.group import Group
from numbsparse.distributed.links import Links
from numbsparse.distributed.on_host import ByMPI, BySockets
from numbsparse.distributed.rendezvous import met
from numbsparse.patterns.checks import number, word

BACKENDS = ("auto", "nccl", "mpi", "sockets")

_group: Group | None = None


def init(backend: str = "auto", timeout: float = 10.0) -> Group:
    """Join the other processes that torchrun, mpirun or our own launcher started.

    Call it before anything touches a GPU: rank r of a host gets its card number r. Called again, it
    gives the same Group. Started without a launcher, the process is rank 0 of 1, and the same
    program runs.

    Parameters
    ----------
    backend : "auto", "nccl", "mpi" or "sockets"
        What carries arrays. "auto" is NCCL for DeviceArrays where there are GPUs and the package
        nccl4py (`pip install 'numbsparse[dist]'`). Others go by MPI under mpirun, else by sockets
        through rank 0, as do all DeviceArrays without NCCL.
    timeout : float
        Seconds to wait for the other ranks.

    Returns
    -------
    Group, for `with`: an error within it is told to the other ranks, which then end too.

    Raises
    ------
    RuntimeError
        On all ranks, where one does not come in time, or has another version of numbsparse or NCCL,
        another backend or size. Where a package or a GPU is missing.
    ValueError
        Where the environment says what cannot be, or for a backend that there is not.

    Examples
    --------
    >>> import numbsparse.distributed as dist
    >>> dist.init().size
    1
    """
    global _group
    word("backend", backend, BACKENDS)
    if not number("timeout", timeout, TIMEOUT_MAX) > 0:  # of sockets, too
        raise ValueError(f"timeout takes seconds above 0, got {timeout}")
    if _group is None or (_group.size > 1 and not _group._is_open):
        _group = _joined(process(), backend, timeout)
    return _group


def _joined(own: Process, backend: str, timeout: float) -> Group:
    if own.size == 1:
        return Group(0, 1, 0, None, None, None)
    if not device.SIMULATED and device.is_available():  # of one, where a launcher shows one
        device.device(own.local_rank % device.n_devices()).use()
    with_nccl = backend in ("auto", "nccl") and _can_use_nccl(required=backend == "nccl")
    mpi = world_of_mpi() if own.is_mpi or backend == "mpi" else None
    by_mpi = mpi is not None and backend != "sockets"
    hello = {
        "numbsparse": numbsparse.__version__,
        "NumPy": np.__version__.split(".")[0],
        "a world of": own.size,
        "NCCL": on_gpu.version() if with_nccl else None,
        "the backend": "mpi" if by_mpi else "sockets",
    }
    found = _meet(own, hello, mpi, timeout)
    try:
        host = ByMPI(found, mpi) if by_mpi else BySockets(found)
        nccl = on_gpu.ByNCCL(found) if with_nccl else None
    except BaseException as error:
        found.close(f"failed: {error}")
        raise
    return Group(own.rank, own.size, own.local_rank, found, host, nccl)


def _can_use_nccl(required: bool) -> bool:
    there = not device.SIMULATED and device.is_available() and on_gpu.is_installed()
    if required and not there:
        what = "nccl4py is not installed: pip install 'numbsparse[dist]'"
        if device.SIMULATED or not device.is_available():
            what = "there is no GPU" if device.SIMULATED else str(device.why_unavailable())
        raise RuntimeError(f"backend 'nccl' takes a GPU for each rank and nccl4py, but {what}")
    return there


def _meet(own: Process, hello: dict[str, Any], mpi: Any, timeout: float) -> Links:
    """The links, where the launcher's own means tell all where rank 0 listens."""
    who = own.rank, own.size, hello, timeout
    if mpi is not None:
        return met(*who, mpi.bcast)
    store, at = store_of_torchrun(timeout), address()
    if store is None:
        return met(*who, at=at)

    def tell(where: tuple[str, int] | None) -> tuple[str, int]:
        if where:
            store.set("port", str(where[1]))
        return at[0], int(store.get("port"))

    return met(*who, tell)
