"""Which rank this process is: what torchrun, MPI and our own launcher say in the environment."""

import os
from importlib.util import find_spec
from typing import Any, NamedTuple

# Rank, size and rank on the host, as each launcher calls them.
NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}


class Process(NamedTuple):
    """Where this process stands among those that a launcher started."""

    launcher: str  # "" where there is none
    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_mpi(self) -> bool:
        return self.launcher in ("Open MPI", "MPICH")


def process() -> Process:
    """What the environment says; one process alone where it says nothing.

    Raises ValueError where it says something that cannot be.
    """
    for launcher, names in NAMES.items():
        if names[0] in os.environ and names[1] in os.environ:
            rank, size = (_number(name) for name in names[:2])
            if not rank < size:
                raise ValueError(f"{names[0]} takes a rank below {names[1]}, {size}, got {rank}")
            local = _number(names[2]) if names[2] in os.environ else 0
            return Process(launcher, rank, size, local)
    return Process("")


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ValueError(f"{name} takes a whole number from 0 on, got {text!r}")
    return int(text)


def world_of_mpi() -> Any:
    """MPI's communicator of all processes."""
    if find_spec("mpi4py") is None:
        raise RuntimeError("processes that mpirun starts need mpi4py: pip install mpi4py")
    from mpi4py import MPI

    return MPI.COMM_WORLD


def address() -> tuple[str, int]:
    """(MASTER_ADDR, MASTER_PORT), where rank 0 listens, or under torchrun its store."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set and {missing[0]} is not: start with torchrun, or set it too")
    if not 0 < (port := _number("MASTER_PORT")) < 1 << 16:
        raise ValueError(f"MASTER_PORT takes a number from 1 to 65535, got {port}")
    return os.environ["MASTER_ADDR"], port


def store_of_torchrun(timeout: float) -> Any:
    """torchrun's own store, which listens at the address; None where another launcher started us.

    Rank 0 cannot listen at that port too, and says by the store at which it does.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    run = f"numbsparse/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = TCPStore(*address(), is_master=False, timeout=timedelta(seconds=timeout))
    return PrefixStore(run, store)
