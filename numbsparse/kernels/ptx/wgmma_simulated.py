"""`wgmma` in the simulator: the last of a warpgroup's 128 threads to arrive computes."""

from functools import cache, lru_cache
from operator import index
from typing import Any

import numpy as np

from numbsparse.kernels.ptx.meaning import float32_of_bfloat16, float32_of_float16, float32_of_tf32
from numbsparse.kernels.ptx.simulated import flat_bytes
from numbsparse.kernels.ptx.tiles import Operand, swizzled
from numbsparse.kernels.ptx.warp import WARP, WARPGROUP, together
from numbsparse.simulator import accesses
from numbsparse.simulator.accesses import multiplying, note_operand, note_unseen
from numbsparse.simulator.arrays import PERIOD
from numbsparse.simulator.clocks import WGMMA
from numbsparse.simulator.threads import current

_KINDS = {"f16": float32_of_float16, "bf16": float32_of_bfloat16, "tf32": float32_of_tf32}


@cache
def wgmma(
    kind: str,
    m_tiles: int,
    n: int,
    k_steps: int,
    a: Operand,
    b: Operand,
    columns: int = 0,
    inputs: int = 1,
    stride: int = 0,
) -> Any:
    """acc[g, m] += rows 64 m .. 64 m + 63 of a, times b of the g-th column that the mask names."""
    depth, block = (8 if kind == "tf32" else 16) * k_steps, n * k_steps * 32
    row, column = accumulators(n)

    def wgmma_meaning(acc, i, j, mask, xs, ws):
        result = acc.reshape(128, max(columns, 1), m_tiles, n // 2).copy()
        at = int(j[0])
        for bit in range(inputs * max(columns, 1)):
            if mask[0] >> bit & 1:
                e, g = divmod(bit, max(columns, 1))
                x = _matrix(kind, xs, int(i[0]) + e * stride, a, 64 * m_tiles, depth)
                product = x @ _matrix(kind, ws, at, b, n, depth).T
                for m in range(m_tiles):
                    result[:, g, m] += product[64 * m + row, column]
                at += block
        return result.reshape(128, -1)

    def multiply(acc, xs, i, ws, j, mask=1):
        if len(acc) != max(columns, 1) * m_tiles * n // 2:
            raise TypeError(f"this wgmma takes another number of accumulators than {len(acc)}")
        i, j = index(i) * xs.itemsize, index(j) * ws.itemsize
        shared = flat_bytes(xs), flat_bytes(ws)
        operands = acc, i, j, index(mask)
        return multiplied(wgmma_meaning, *operands, shared=shared, registers=True)

    return multiply


def accumulators(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) in a 64 x n product of what each thread accumulates: (128 threads, n // 2).

    Warp w of the warpgroup has rows 16 w to 16 w + 15, and in these and every 8 columns the 16 x 8
    fragment of `meaning.C_16x8`. PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16".
    """
    t, i = np.arange(128)[:, None], np.arange(n // 2)
    return t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, t % 4 * 2 + i % 2 + i // 4 * 8


def multiplied(meaning, *operands, shared, registers=False):
    """A warpgroup runs products, which note by `read` what they read of shared memory."""
    note_unseen(WGMMA)
    thread = current()
    # Each warp begins by itself, reads all of it, and waits only for its own reads.
    with multiplying(thread.block, thread.thread_id // WARP):
        return together(meaning, *operands, shared=shared, of=WARPGROUP, registers=registers)


def read(shared, byte):
    """The running products read these bytes, all of every 16."""
    if accesses.watcher is not None:
        thread = current()
        pieces = np.unique((shared.address + byte) // 16)
        runs = np.split(pieces, np.flatnonzero(np.diff(pieces) > 1) + 1)
        first = thread.thread_id // WARPGROUP * WARPGROUP // WARP
        for warp in range(first, first + WARPGROUP // WARP):
            note_operand([(16 * int(run[0]), 16 * len(run)) for run in runs], thread.block, warp)


def zeros(count: int) -> Any:
    return lambda: (np.float32(0),) * count


def to_local(values, local):
    local.reshape(-1)[:] = values


def from_local(count: int) -> Any:
    return lambda local: tuple(local.reshape(-1)[:count].astype(np.float32))


def more_registers(n):
    if n not in range(24, 257, 8):
        raise ValueError(f"registers are 24 to 256, a multiple of 8, got {n}")


fewer_registers = more_registers


def check_start(shared, start):
    """A descriptor has no more bits of an address."""
    if (shared.address + start) % 16:
        raise ValueError(f"an operand starts at byte {start}, which is not a multiple of 16")


def _matrix(kind, shared, start, operand, rows, depth):
    """(rows, depth) float32 of an operand in shared memory; swizzled by the address."""
    check_start(shared, start)
    item = 4 if kind == "tf32" else 2
    byte = start + _places((shared.address + start) % PERIOD, operand, rows, depth, item)
    if byte.min(initial=0) < 0:
        raise IndexError("an operand begins before its shared array, when swizzled")
    read(shared, byte)
    values = np.asarray(shared).view(f"u{item}")[byte // item]
    return _KINDS[kind](values.view(np.uint32))


@lru_cache(1024)
def _places(first, operand, rows, depth, item):
    """(rows, depth): where the items of an operand are, in bytes from its first one on, which is so
    many behind a multiple of PERIOD."""
    row, k = np.arange(rows)[:, None], np.arange(depth)
    return swizzled(first + operand.place(row, k, item), operand.width) - first
