"""Memory of one process that others of its host open too, by the driver's interprocess handles."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from numbsparse.device import runtime, streams
from numbsparse.device.array import DeviceArray

_checked = partial(runtime.checked, what="sharing memory with another process")


class _Memory:
    """Gives it back at the end."""

    def __init__(self, address: int, give_back: Any):
        self.address, self._give_back = address, give_back

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # then the GPU may wait for a process that is no more
            self._give_back(self.address)


def shared(words: int) -> tuple[DeviceArray, str]:
    """Zeros, uint32, and what another process of this host opens them by."""
    driver, stream = runtime.driver(), streams.current()
    with stream.context():
        address = int(_checked(driver.cuMemAlloc(4 * words)))
        _checked(driver.cuMemsetD32Async(address, 0, words, stream.handle))
        handle = _checked(driver.cuIpcGetMemHandle(address))
    stream.synchronize()  # the others may write there from now on
    memory = _Memory(address, driver.cuMemFree)
    return DeviceArray(address, (words,), "uint32", None, memory), bytes(handle.reserved).hex()


def opened(handle: str, words: int) -> DeviceArray:
    """What another process shares, on its own GPU."""
    driver = runtime.driver()
    of = driver.CUipcMemHandle()
    of.reserved = bytes.fromhex(handle)
    how = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    with streams.current().context():
        address = int(_checked(driver.cuIpcOpenMemHandle(of, int(how))))
    return DeviceArray(
        address, (words,), "uint32", None, _Memory(address, driver.cuIpcCloseMemHandle)
    )


def let_go(flags: DeviceArray) -> None:
    """Set all flags, beside what the GPU is at: no kernel there waits for them any more."""
    stream = streams.beside()
    with stream.context():
        driver = runtime.driver()
        _checked(driver.cuMemsetD32Async(flags.address, 2**31 - 1, flags.size, stream.handle))
