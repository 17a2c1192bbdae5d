"""GPUs of a host exchange rows through memory that the others write: a mailbox of two slots each.

`push` writes to another's mailbox, `notify` says so by a flag there, and `take_whole` or `take_sum`
waits for the flags of all others and reads its own mailbox. A slot is written again two exchanges
later: by then each GPU has notified once more, and so has read it.
"""

from typing import NamedTuple

from numba import cuda, float32

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.ptx import load_acquire_system, store_release_system

THREADS = 32 if SIMULATED else 256
BLOCKS = 2 if SIMULATED else 264


class Ends(NamedTuple):
    """Of a GPU, number `rank` of `size`: where it reads, and where it writes.

    Attributes
    ----------
    mine : uint32 (2, size, words), its mailbox: of each slot a part for each sender
    theirs : the mailboxes of all GPUs; what stands for itself is not used
    my_flags : int32 (size,), how often each sender has notified
    their_flags : of all GPUs
    exchanges : int32 (1,), so far
    """

    rank: int
    size: int
    mine: DeviceArray
    theirs: list[DeviceArray]
    my_flags: DeviceArray
    their_flags: list[DeviceArray]
    exchanges: DeviceArray


def send_whole(rows: DeviceArray, ends: Ends) -> None:
    """To each other GPU, all of the rows."""
    _send(rows, rows.shape[1], 0, ends)


def send_parts(rows: DeviceArray, ends: Ends) -> None:
    """To each other GPU, its part of each of the rows."""
    width = rows.shape[1] // ends.size
    _send(rows, width, width, ends)


def _send(rows: DeviceArray, width: int, step: int, ends: Ends) -> None:
    """To GPU number i, `width` items of each row from i * step on."""
    words = rows.view("uint32")
    width, step = (n * rows.itemsize // 4 for n in (width, step))
    others = [(ends.rank + i) % ends.size for i in range(1, ends.size)]  # not all to one at a time
    for other in others:
        to = ends.theirs[other], ends.exchanges, ends.rank
        launch(push, _grid(words), THREADS, words, *to, other * step, width)
    for i, other in enumerate(others):
        launch(notify, 1, 1, ends.exchanges, int(i == 0), ends.their_flags[other], ends.rank)


def receive_whole(own: DeviceArray, whole: DeviceArray, ends: Ends) -> None:
    """whole[:] = what all GPUs sent, beside each other; `own` is what this one did."""
    words, mail = own.view("uint32"), (ends.mine, ends.exchanges, ends.my_flags, ends.rank)
    launch(take_whole, _grid(words), THREADS, words, *mail, whole.view("uint32"))


def receive_sum(term: DeviceArray, part: DeviceArray, ends: Ends) -> None:
    """part[:] = this GPU's part of `term`, and of what the others sent, in the order of GPUs."""
    mail = ends.mine.view(part.dtype), ends.exchanges, ends.my_flags, ends.rank
    launch(take_sum, _grid(part), THREADS, term, *mail, part)


def _grid(rows: DeviceArray) -> tuple[int, int]:
    """Of a row, some blocks of threads."""
    return max(BLOCKS // rows.shape[0], 1), rows.shape[0]


@cuda.jit
def push(source, mailbox, count, rank, first, width):
    slot, row = mailbox[(count[0] + 1) & 1, rank], cuda.blockIdx.y
    for k in range(cuda.grid(1), width, cuda.gridsize(1)):
        slot[row * width + k] = source[row, first + k]


@cuda.jit
def notify(count, more, flags, rank):
    count[0] += more
    store_release_system(flags, rank, count[0])


@cuda.jit(device=True)
def wait_for_all(flags, count, rank):
    """Until every other GPU has notified as often as this one."""
    other = cuda.threadIdx.x
    if other < flags.size and other != rank:
        while load_acquire_system(flags, other) < count[0]:
            pass
    cuda.syncthreads()


@cuda.jit
def take_whole(own, mailbox, count, flags, rank, whole):
    wait_for_all(flags, count, rank)
    slot, row, width = mailbox[count[0] & 1], cuda.blockIdx.y, own.shape[1]
    for k in range(cuda.grid(1), width, cuda.gridsize(1)):
        for sender in range(flags.size):
            word = own[row, k] if sender == rank else slot[sender, row * width + k]
            whole[row, sender * width + k] = word


@cuda.jit
def take_sum(term, mailbox, count, flags, rank, part):
    wait_for_all(flags, count, rank)
    slot, row, width = mailbox[count[0] & 1], cuda.blockIdx.y, part.shape[1]
    for k in range(cuda.grid(1), width, cuda.gridsize(1)):
        total = float32(0)
        for sender in range(flags.size):
            own = sender == rank
            total += widened(term[row, rank * width + k] if own else slot[sender, row * width + k])
        part[row, k] = rounded(total, part)
