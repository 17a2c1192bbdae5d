"""Two processes whose simulated GPUs write each other's memory, as do those of one host by NCCL."""

import ctypes
import mmap
import os
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from numbsparse import device
from numbsparse.device import DeviceArray
from numbsparse.distributed import exchange
from numbsparse.kernels import exchange as kernels


class Collectives:
    """Those of the host, on simulated memory."""

    name = "nccl"

    def __init__(self, host):
        self.host = host

    def all_reduce(self, x, op, out):
        device.simulated(out)[...] = self.host.all_reduce(device.simulated(x).copy(), op)

    def all_gather(self, x, out):
        device.simulated(out)[...] = self.host.all_gather(device.simulated(x).copy())


def shared(words):
    name = os.path.join(tempfile.gettempdir(), f"numbsparse-{os.getpid()}-{time.monotonic_ns()}")
    Path(name).write_bytes(bytes(4 * words))
    return mapped(name, words), name


def opened(name, words):
    memory = mapped(name, words)
    os.unlink(name)  # both have it
    return memory


def mapped(name, words):
    with open(name, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 4 * words)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return DeviceArray(address, (words,), "uint32", None, memory)


def load(flags, k):
    """The other process sets it, while this one's only thread waits."""
    time.sleep(0.001)
    return np.int32(flags[k])


@contextmanager
def as_cards(group):
    """Within this context the two ranks have a simulated GPU each."""
    with ExitStack() as patches:
        for room, name, value in (
            (exchange, "shared", shared),
            (exchange, "opened", opened),
            (kernels, "load_acquire_system", load),
            (group, "_nccl", Collectives(group._host)),
        ):
            patches.enter_context(patch.object(room, name, value))
        yield
