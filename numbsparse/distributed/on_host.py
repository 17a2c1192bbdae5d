"""Collectives on NumPy arrays: over the links to rank 0, or by MPI.

Both give every rank the same bits. The links need nothing else and sum in the order of ranks, all
of it on rank 0: for a few processes, and for tests. MPI is for more.
"""

from functools import reduce
from typing import Any

import numpy as np

from numbsparse.distributed.links import Links

OPERATIONS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


def combined(parts: list[np.ndarray], op: str) -> np.ndarray:
    """Of several arrays one, in the order given; 16-bit floats are summed in float32."""
    dtype = parts[0].dtype
    total = reduce(OPERATIONS[op], (widened(part) for part in parts))
    return finished(total, op, len(parts), dtype)


def widened(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.kind not in "iu" and x.dtype.itemsize == 2 else x


def finished(total: np.ndarray, op: str, size: int, dtype: np.dtype) -> np.ndarray:
    total = total / total.dtype.type(size) if op == "mean" else total
    return np.asarray(total, dtype)  # of what has no axes, which NumPy makes a scalar, too


def as_bytes(x: np.ndarray) -> np.ndarray:
    """The bytes of a C-contiguous array, of any dtype and with any axes, as an array."""
    return x.reshape(-1).view(np.uint8)


class BySockets:
    """Each collective is one meeting at rank 0, which checks that all mean the same."""

    name = "sockets"

    def __init__(self, links: Links):
        self._links = links

    def all_reduce(self, x: np.ndarray, op: str, name: str = "all_reduce") -> np.ndarray:
        def answer(parts: list[bytearray]) -> np.ndarray:
            return as_bytes(combined([_array(part, x) for part in parts], op))

        return _array(self._links.meet(call(name, x, op), as_bytes(x), answer), x)

    def broadcast(self, x: np.ndarray, root: int) -> np.ndarray:
        own = as_bytes(x) if self._links.rank == root else b""
        about = call("broadcast", x, f"from rank {root}")
        return _array(self._links.meet(about, own, lambda parts: parts[root]), x)

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        """(size, *x.shape)"""
        got = self._links.meet(call("all_gather", x), as_bytes(x), b"".join)
        return np.frombuffer(got, np.uint8).view(x.dtype).reshape(self._links.size, *x.shape)

    def reduce_scatter(self, x: np.ndarray, op: str) -> np.ndarray:
        """x (size, ...): of the sum that part which has this rank's number."""
        return self.all_reduce(x, op, "reduce_scatter")[self._links.rank]


def call(name: str, x: Any, *more: str) -> dict[str, Any]:
    """What ranks compare before a collective."""
    about = {"call": name, "dtype": str(x.dtype), "shape": list(x.shape)}
    return about | {str(i): word for i, word in enumerate(more)}


def _array(part: bytearray, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(part, np.uint8).view(like.dtype).reshape(like.shape)


class ByMPI:
    """MPI's collectives; 16-bit floats, which it does not know, go as float32."""

    name = "mpi"

    def __init__(self, links: Links, world: Any):
        from mpi4py import MPI

        self._links, self.world = links, world
        self._operations = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}

    def all_reduce(self, x: np.ndarray, op: str) -> np.ndarray:
        total = np.empty_like(wide := widened(x))
        self.world.Allreduce(wide, total, self._operations[op])
        return finished(total, op, self._links.size, x.dtype)

    def broadcast(self, x: np.ndarray, root: int) -> np.ndarray:
        result = x.copy()
        self.world.Bcast(as_bytes(result), root)
        return result

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        result = np.empty((self._links.size, *x.shape), x.dtype)
        self.world.Allgather(as_bytes(x), as_bytes(result))
        return result

    def reduce_scatter(self, x: np.ndarray, op: str) -> np.ndarray:
        part = np.empty_like((wide := widened(x))[0])
        self.world.Reduce_scatter_block(wide, part, self._operations[op])
        return finished(part, op, self._links.size, x.dtype)
