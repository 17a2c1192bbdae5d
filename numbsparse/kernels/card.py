"""What kernels find out about the card before they are launched."""

from typing import Any

from numbsparse.device import SIMULATED, compute_capability, runtime

REGISTERS = 65536  # of a multiprocessor
_KILOBYTES = {  # of shared memory that a block may have; else 99
    **{(7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163},
    **{(9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227},
}


def shared_memory() -> int | None:
    """Bytes of shared memory that a block may have; None in the simulator."""
    return None if SIMULATED else 1024 * _KILOBYTES.get(compute_capability(), 99)


def resident(nbytes: int) -> int:
    """How many blocks of threads with so many bytes of shared memory a multiprocessor holds.

    It has a KiB more than a block may have, and each block takes one beside its own, and barriers.
    """
    most = shared_memory()
    return 1 if most is None else max((most + 1024) // (nbytes + 2048), 1)


def copy_engine() -> bool:
    """Whether the card has one, and barriers that count its bytes."""
    return SIMULATED or compute_capability() >= (9, 0)


def rounds_pairs() -> bool:
    """Whether the card has an instruction that makes two 16-bit values of two float32."""
    return SIMULATED or compute_capability() >= (8, 0)


def registers(threads: int, most: int = 248) -> dict[str, int]:
    """An option of `cuda.jit`: what a multiprocessor has for each of so many threads, by eights."""
    each = REGISTERS // (-(-threads // 128) * 128)  # handed out to four warps at once
    return {} if SIMULATED else {"max_registers": min(each // 8 * 8, most)}


def handed_over(warps: int, fetchers: int, fewer: int = 24) -> tuple[int, int, dict[str, Any]]:
    """Registers of a thread that fetches and of one that multiplies, which hand them over by fours
    of warps (setmaxnreg), or 0 where there are no fours; and what the compiler is told."""
    every = warps + fetchers
    if not SIMULATED and (warps % 4 or fetchers % 4):
        return 0, 0, registers(32 * every, most=255)
    each = REGISTERS // (32 * every) // 8 * 8
    more = min((each * every - fewer * fetchers) // warps // 8 * 8, 240)
    return fewer, more, {} if SIMULATED else {"launch_bounds": (32 * every, 1)}


def multiprocessors() -> int:
    return 2 if SIMULATED else runtime.multiprocessors()
