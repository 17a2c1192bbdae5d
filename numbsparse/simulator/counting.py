"""Count a kernel's requests to memory, in the simulator: what a rung costs, seen without a GPU.

The threads of a warp that reach the same place in the text for the same time access memory
together: one request. Its cost follows from its addresses only,

    global memory: sectors, the pieces of 32 bytes that it touches,
    shared memory: wavefronts, each of which serves 32 banks of 4 bytes; words of the same bank
        take one each.

A request of accesses wider than 4 bytes is served in as many parts. NVIDIA, "CUDA C++ Programming
Guide", on global and shared memory; Nsight Compute counts the same sectors and wavefronts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numbsparse.simulator.accesses import Access, Launch, Recording, record
from numbsparse.simulator.clocks import COPY

WARP, SECTOR, BANK, BANKS = 32, 32, 4, 32
OWN = ("", COPY)  # units whose accesses are a thread's requests


class Traffic(NamedTuple):
    """What the warps of a kernel requested of one memory, in one direction."""

    requests: int  # of whole warps
    accesses: int  # of threads
    nbytes: int  # that the threads requested
    units: int  # sectors of global memory, wavefronts of shared memory
    least: int  # units, if addresses were ideal

    @property
    def excess(self) -> int:
        """Sectors fetched beyond the bytes requested; wavefronts that wait for a bank."""
        return self.units - self.least


@dataclass(frozen=True)
class Count:
    """What one launch requested. `str` shows it as a table."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    global_reads: Traffic
    global_writes: Traffic
    shared_reads: Traffic
    shared_writes: Traffic
    barriers: int  # `syncthreads` that a block passes, of the block that passes most
    unseen: tuple[str, ...]  # units of the GPU at work here whose accesses are not counted
    local_bytes: int = 0  # of local arrays, in registers where they fit; of the thread with most

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "requests", "accesses", "bytes", "units", "excess")]
        for name in ("global_reads", "global_writes", "shared_reads", "shared_writes"):
            traffic = getattr(self, name)
            unit = "sectors" if name.startswith("global") else "wavefronts"
            cells = (*traffic[:3], f"{traffic.units:,} {unit}", traffic.excess)
            shown = (c if isinstance(c, str) else f"{c:,}" for c in cells)
            rows.append((name.replace("_", " "), *shown))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        head = (
            f"{self.kernel}, {self.grid} blocks of {self.block} threads, {self.barriers} barriers"
        )
        lines = (
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        )
        unseen = f"not counted: the bytes of {' and '.join(self.unseen)}"
        return "\n".join([head, *lines, *([unseen] if self.unseen else [])])


def count(call: Callable[[], Any] | Recording) -> list[Count]:
    """Run `call` and count what each kernel that it launches requests of the memory.

    Parameters
    ----------
    call : function of no arguments, or what `record` gave

    Returns
    -------
    list of Count, one for each launch, in order
        Each names `requests` (of warps), `accesses` (of threads), `nbytes`, `units` (sectors of 32
        bytes, or wavefronts) and `excess` (units beyond those that the bytes alone would take), of
        reads and writes to global and to shared memory, the barriers, in `unseen` what else was
        at work, "the copy engine", "wgmma", and the bytes of a thread's local arrays.

    Notes
    -----
    Every access in the kernel's code counts; a compiler may keep in a register what a loop reads
    again. Caches are not simulated: a sector is counted each time that it is requested. What the
    copy engine moves and `wgmma` reads is not counted, nor are accesses to local arrays. A kernel
    launched for the first time may come after others that prepare it, each a launch of its own.

    Raises RuntimeError outside the simulator: set NUMBA_ENABLE_CUDASIM=1 before numba is imported.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> w = ns.nn.init.uniform(ns.Layout([[1, 0], [1, 1]]), 8, seed=0)
    >>> x = np.ones((4, 16), np.float32)
    >>> if ns.device.SIMULATED:
    ...     (counted,) = ns.testing.count(lambda: ns.matmul(x, w.to("cuda"), kernel="k1_naive"))
    ...     print(counted.global_writes.nbytes)
    ... else:
    ...     print(4 * 16 * 4)
    256
    """
    return [_count(launch) for launch in record(call)]


def _count(launch: Launch) -> Count:
    traffic = {
        (space, writes): _traffic(space, _requests(launch, space, writes))
        for space in ("global", "shared")
        for writes in (False, True)
    }
    barriers = [thread.barriers for thread in launch.threads if thread.number == 0]
    return Count(
        getattr(launch.kernel, "__name__", "kernel"),
        launch.grid,
        launch.block if isinstance(launch.block, tuple) else (launch.block,),
        traffic["global", False],
        traffic["global", True],
        traffic["shared", False],
        traffic["shared", True],
        max(barriers, default=0),
        tuple(sorted(launch.unseen)),
        max((sum(thread.local_arrays.values()) for thread in launch.threads), default=0),
    )


def _requests(launch: Launch, space: str, writes: bool) -> Iterable[list[Access]]:
    """The accesses that a warp makes together: of one instruction, for the same time."""
    together: dict[Any, list[Access]] = defaultdict(list)
    for thread in sorted(launch.threads, key=lambda thread: thread.number):
        times: Counter[Any] = Counter()
        for access in thread.accesses:
            if access.writes == writes and access.space == space and access.unit in OWN:
                time = access.site, times[access.site]
                together[thread.block, thread.number // WARP, time].append(access)
                times[access.site] += 1
    return together.values()


def _traffic(space: str, requests: Iterable[list[Access]]) -> Traffic:
    total = [0, 0, 0, 0, 0]
    for accesses in requests:
        nbytes = sum(access.nbytes for access in accesses)
        units, least = units_of(space, accesses)
        for i, number in enumerate((1, len(accesses), nbytes, units, least)):
            total[i] += number
    return Traffic(*total)


def units_of(space: str, accesses: list[Access]) -> tuple[int, int]:
    """What a request costs, and the least that its bytes could."""
    return (_sectors if space == "global" else _wavefronts)(accesses)


def _sectors(accesses: list[Access]) -> tuple[int, int]:
    """The sectors that a request touches, and how few could hold its bytes."""
    touched = {sector for access in accesses for sector in sectors_of(access)}
    distinct = len({access.address for access in accesses}) * accesses[0].nbytes
    return len(touched), -(-distinct // SECTOR)


def _wavefronts(accesses: list[Access]) -> tuple[int, int]:
    """A wavefront for each word of the busiest bank, in each part of a request."""
    taken, least = 0, 0
    for part in parts_of(accesses):
        words = {word for access in part for word in words_of(access)}
        taken += max(Counter(word % BANKS for word in words).values())
        least += -(-len(words) // BANKS)
    return taken, least


def parts_of(accesses: list[Access]) -> Iterator[list[Access]]:
    lanes = WARP * BANK // max(accesses[0].nbytes, BANK)
    for start in range(0, len(accesses), lanes):
        yield accesses[start : start + lanes]


def sectors_of(access: Access) -> range:
    return range(access.address // SECTOR, (access.address + access.nbytes - 1) // SECTOR + 1)


def words_of(access: Access) -> range:
    return range(access.address // BANK, (access.address + access.nbytes - 1) // BANK + 1)
