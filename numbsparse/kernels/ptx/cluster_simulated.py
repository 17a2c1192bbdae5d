"""The instructions of `cluster_emitted` in the simulator."""

from functools import cache
from operator import index
from typing import Any

import numpy as np

from numbsparse.kernels.ptx.mbarrier_simulated import barrier_of
from numbsparse.kernels.ptx.simulated import flat_bytes
from numbsparse.kernels.ptx.tiles import Operand
from numbsparse.kernels.ptx.wgmma_simulated import _matrix, accumulators, multiplied
from numbsparse.simulator import accesses
from numbsparse.simulator.accesses import note
from numbsparse.simulator.arrays import counterpart
from numbsparse.simulator.threads import current


def cluster_sync():
    thread = current()
    thread.block.synchronize_cluster(thread)


def mbarrier_arrive_at(bars, i, rank):
    barrier_of(bars, i, int(rank)).arrive(0)


def load_4xf32_at(shared, j, rank):
    v = _four_at("load_4xf32_at", shared, j, rank, False)
    return v[0], v[1], v[2], v[3]  # a tuple of an array takes five times as long


def store_4xf32_at(shared, j, rank, *values):
    _four_at("store_4xf32_at", shared, j, rank, True)[:] = values


def _four_at(name, shared, j, rank, is_write):
    """The 16 bytes of that block's array, as float32."""
    if shared.dtype != np.float32:
        raise TypeError(f"{name} takes an array of float32, got {shared.dtype}")
    block, start = current().block, 4 * index(j)
    other = block.cluster[index(rank)]
    there = flat_bytes(counterpart(shared, block, other))
    if not 0 <= start <= there.size - 16 or start % 16:
        raise IndexError(f"16 bytes of a block's shared memory are not at its byte {start}")
    if accesses.watcher is not None:
        note("shared", is_write, there.address + start, 16, home=other.place)
    return np.ndarray(4, np.float32, there, start)


def words(count: int) -> Any:
    return lambda array, j: tuple(np.asarray(array).reshape(-1)[j : j + count].view(np.uint32))


@cache
def wgmma_units(
    kind: str, units: int, n: int, k_steps: int, a: Operand, b: Operand, joined: bool = False
) -> Any:
    """acc[u] += 64 rows of a times n columns of b, where `where` says, for the units counted.

    `where` holds two words for each unit, as the lower words of the hardware's descriptors: bits 0
    to 13 the place of the operand from the start on, bits 16 to 29 the distance of its panels, both
    in 16 bytes. Units that are `joined` are one product, where the first of them says.
    """

    def of_a(shared, start, word):
        return _matrix(kind, shared, *_placed(start, word, a), 64, 16 * k_steps)

    return _units(kind, units, n, k_steps, of_a, b, joined)


@cache
def wgmma_pairs(kind: str, units: int, n: int, k_steps: int, width: int, b: Operand) -> Any:
    """`wgmma_units` whose a has 32 rows each of two tiles, anywhere.

    A tile's rows are lines of `width` bytes along the sum; `where` holds for a the place of the one
    and the distance to the other, which begin at multiples of 1024 bytes.
    """
    tile = Operand(width, 0)

    def of_a(shared, start, word):
        first, placed = _placed(start, word, tile)
        places = first, first + placed.panel
        return np.vstack([_matrix(kind, shared, p, tile, 32, 16 * k_steps) for p in places])

    return _units(kind, units, n, k_steps, of_a, b)


def _units(
    kind: str, units: int, n: int, k_steps: int, of_a: Any, b: Operand, joined: bool = False
) -> Any:
    """`of_a` gives the 64 rows of a that a word says."""
    row, column = accumulators(n)

    def wgmma_units_meaning(acc, start, where, number, shared):
        result = acc.reshape(128, units, n // 2).copy()
        counted = int(number[0])
        beside = max(counted, 1) if joined else 1
        for u in range(0, counted, beside):
            x = of_a(shared, start[0], where[0, 2 * u])
            placed = _placed(start[0], where[0, 2 * u + 1], b)
            product = x @ _matrix(kind, shared, *placed, beside * n, 16 * k_steps).T
            for v in range(beside):
                result[:, u + v] += product[row, column + v * n]
        return result.reshape(128, -1)

    def multiply(acc, shared, i, where, number):
        if len(acc) != units * n // 2 or len(where) != 2 * units:
            raise TypeError(f"this wgmma takes other tuples than {len(acc)} and {len(where)}")
        start, shared = index(i) * shared.itemsize, (flat_bytes(shared),)
        operands = acc, start, where, index(number)
        return multiplied(wgmma_units_meaning, *operands, shared=shared, registers=True)

    return multiply


def _placed(start: int, word: Any, operand: Operand) -> tuple[int, Operand]:
    place, panel = (index(word) & 0x3FFF) << 4, index(word) >> 16 << 4
    return index(start) + place, operand._replace(panel=panel)
