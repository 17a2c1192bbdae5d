"""Calls on a card of another compute capability, which is not there: do they compile, and fit?"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import prod
from multiprocessing import get_context
from typing import Any

from numbsparse.device import stand_in
from numbsparse.device.waits import shown
from numbsparse.kernels.card import REGISTERS, copy_engine, shared_memory
from numbsparse.machine_code.calls import NotServed, calls
from numbsparse.machine_code.cubin import description, shared_bytes

Capability = tuple[int, int]
THREADS = 1024  # of a block, at most
BARRIERS = 1024  # bytes of shared memory that a kernel may have of its own, unless they are known
GRID = 65535  # blocks along any axis but the first

_misfits: list[str] = []


def run(capability: Capability, names: Sequence[str], jobs: int) -> bool:
    """Compile these calls for it, in so many processes; whether all that serve there compile, and
    their launches fit. A line says how many those are; then follows one for each misfit."""
    context, begin = get_context("spawn"), partial(_begin, capability)
    with ProcessPoolExecutor(min(jobs, len(names)), context, begin) as pool:
        found = pool.map(misfits_of, names)
        reasons = {name: next(found) for name in shown(names, "compiled")}
    served = {name: those for name, those in reasons.items() if those is not None}
    said = ".".join(map(str, capability))
    print(f"{len(served)} of {len(names)} calls serve compute capability {said}")
    for name, those in served.items():
        for reason in those:
            print(f"{name}: {reason}")
    return not any(served.values())


def _begin(capability: Capability) -> None:
    stand_in.install(capability, start=_launched)


def _launched(kernel: stand_in.Compiled, how: tuple[Any, ...]) -> None:
    own = shared_bytes(kernel.cubin), description(kernel.cubin)["registers"]
    if reason := misfit(how, *own):
        _misfits.append(f"{kernel.name} {reason}")


def misfits_of(name: str) -> list[str] | None:
    """What the card would refuse of a call, in a process whose card is not there; None: no rung."""
    _misfits.clear()
    stand_in.forget()
    try:
        calls()[name]()()
    except NotServed:
        return None
    except Exception as error:  # the compiler's own
        return [f"{type(error).__name__}: {error}"]
    return list(_misfits)


def misfit(how: tuple[Any, ...], static: int = BARRIERS, registers: int = 0) -> str | None:
    """What a card would refuse of a launch, in words; or None.

    how : (grid, block, bytes of shared memory, cluster, overlap, together)
    static : bytes of shared memory that the kernel itself has
    registers : of a thread, if they are known
    """
    grid, block, dynamic, cluster, overlap, _ = how
    threads = prod(block) if isinstance(block, tuple) else block
    there, used = shared_memory() or 0, dynamic + static
    if used > there:
        return f"takes {used} bytes of shared memory of a block, which has up to {there}"
    if threads > THREADS or max(grid[1:], default=0) > GRID:
        return f"takes a grid of {grid} and {threads} threads of a block"
    if -(-threads // 128) * 128 * -(-registers // 8) * 8 > REGISTERS:
        return f"takes {registers} registers of {threads} threads each"
    if (cluster or overlap) and not copy_engine():
        return "takes clusters, or overlaps the kernel before it"
    return None
