"""Two GPUs exchange rows through memory that the other one writes: a mailbox of two slots each.

`push` writes to the other's mailbox, `notify` says so by a flag there, and `take_whole` or
`take_sum` waits for the other's flag and reads its own mailbox. A slot is written again two
exchanges later: by then the other GPU has notified once more, and so has read it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import cuda

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.ptx import load_acquire_system, store_release_system

THREADS = 32 if SIMULATED else 256
BLOCKS = 2 if SIMULATED else 264


class Ends(NamedTuple):
    """Mailboxes, uint32 (2, words), and flags, int32 (1,), of both GPUs; exchanges so far."""

    mine: DeviceArray
    theirs: DeviceArray
    my_flag: DeviceArray
    their_flag: DeviceArray
    exchanges: DeviceArray


def send(rows: DeviceArray, part: int, parts: int, ends: Ends) -> None:
    """To the other GPU, part number `part` of each of the rows, which have so many."""
    words = _words(rows)
    width = words.shape[1] // parts
    launch(push, _grid(words), THREADS, words, ends.theirs, ends.exchanges, part * width, width)
    launch(notify, 1, 1, ends.exchanges, ends.their_flag)


def receive_whole(own: DeviceArray, rank: int, whole: DeviceArray, ends: Ends) -> None:
    """whole[:] = what both GPUs sent, beside each other; `own` is what this one did."""
    words, mail = _words(own), (ends.mine, ends.exchanges, ends.my_flag)
    first = rank * words.shape[1], (1 - rank) * words.shape[1]
    launch(take_whole, _grid(words), THREADS, words, *mail, _words(whole), *first)


def receive_sum(term: DeviceArray, rank: int, part: DeviceArray, ends: Ends) -> None:
    """part[:] = this rank's part of `term`, and what the other GPU sent."""
    items = ends.mine.nbytes // 2 // part.itemsize
    mailbox = DeviceArray(ends.mine.address, (2, items), part.dtype, None, ends.mine)
    mail = mailbox, ends.exchanges, ends.my_flag
    launch(take_sum, _grid(part), THREADS, term, *mail, part, rank * part.shape[1])


def _words(rows: DeviceArray) -> DeviceArray:
    shape = rows.shape[0], rows.shape[1] * rows.itemsize // 4
    return DeviceArray(rows.address, shape, np.uint32, None, rows.owner)


def _grid(rows: DeviceArray) -> tuple[int, int]:
    """Of a row, some blocks of threads."""
    return max(BLOCKS // rows.shape[0], 1), rows.shape[0]


@cuda.jit
def push(source, mailbox, count, first, width):
    slot, row = mailbox[(count[0] + 1) & 1], cuda.blockIdx.y
    for k in range(cuda.grid(1), width, cuda.gridsize(1)):
        slot[row * width + k] = source[row, first + k]


@cuda.jit
def notify(count, flag):
    count[0] += 1
    store_release_system(flag, 0, count[0])


@cuda.jit(device=True)
def wait_for(flag, count):
    """Until the other GPU has notified as often as this one."""
    if cuda.threadIdx.x == 0:
        while load_acquire_system(flag, 0) < count[0]:
            pass
    cuda.syncthreads()


@cuda.jit
def take_whole(own, mailbox, count, flag, whole, first, other):
    wait_for(flag, count)
    slot, row, width = mailbox[count[0] & 1], cuda.blockIdx.y, own.shape[1]
    for k in range(cuda.grid(1), width, cuda.gridsize(1)):
        whole[row, first + k] = own[row, k]
        whole[row, other + k] = slot[row * width + k]


@cuda.jit
def take_sum(term, mailbox, count, flag, part, first):
    wait_for(flag, count)
    slot, row, width = mailbox[count[0] & 1], cuda.blockIdx.y, part.shape[1]
    for k in range(cuda.grid(1), width, cuda.gridsize(1)):
        part[row, k] = rounded(widened(term[row, first + k]) + widened(slot[row * width + k]), part)
