"""Tensor maps: what the copy engine of compute capability 9.0 must know of a matrix, in 128 bytes.

The driver works them out on the host. They are copied to the GPU once, and stay there for the next
call with the same matrix.
"""

from collections import OrderedDict
from typing import Any

import numpy as np

from numbsparse.device import runtime, streams
from numbsparse.device.array import DeviceArray, to_device
from numbsparse.device.capture import outside_capture

WORDS = 16  # of 64 bits
SWIZZLES = (32, 64, 128)  # bytes of a line of a box
REMEMBERED = 4096  # maps

SIMULATED_MAP = np.dtype(
    {
        "names": ["address", "axes", "itemsize", "shape", "strides", "box", "steps"],
        "formats": ["u8", "i2", "i2", "(5,)i4", "(5,)i8", "(5,)i4", "(5,)i4"],
        "itemsize": 8 * WORDS,
    }
)
"""What the 128 bytes say in the simulator."""

Sizes = tuple[int, ...]
# address, shape, strides but the last, bytes of an item, box, steps
Key = tuple[int, Sizes, Sizes, int, Sizes, Sizes]

_maps: OrderedDict[tuple[Any, ...], DeviceArray] = OrderedDict()


def tensor_map(x: DeviceArray, box: Sizes, steps: Sizes = ()) -> DeviceArray:
    """The map of an array of two to five axes for boxes of it, each line swizzled.

    No axis of x is empty, the last one is gapless; its address and the other strides are multiples
    of 16 bytes. A line of the box has 32, 64 or 128 bytes. With `steps`, up to 8, a box has every
    so many-th item along each axis, of no more than 256 there. The map is 16 words of int64.
    """
    return _remembered((_key(x, box, steps),), (WORDS,))


def tensor_maps(*boxes: tuple[Any, ...]) -> DeviceArray:
    """Several maps one after another, (maps, 16), each of what `tensor_map` takes, and of whether
    lines stay `plain`, which have another multiple of 16 bytes."""
    return _remembered(tuple(_key(*box) for box in boxes), (len(boxes), WORDS))


def _key(x: DeviceArray, box: Sizes, steps: Sizes = (), plain: bool = False) -> Key:
    # An axis of one item may have any stride, so perhaps none that the driver takes.
    fitting = -(-x.nbytes // 16) * 16
    strides = tuple(fitting if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True))
    key = (x.address, x.shape, strides[:-1], x.itemsize, box, steps or (1,) * x.ndim)
    line = box[-1] * x.itemsize
    if line % 16 or (line in SWIZZLES) == plain:
        raise _refused(key, f"a line of it has none of {SWIZZLES} bytes, or is plain and has")
    return key


def _remembered(keys: tuple[Key, ...], shape: Sizes) -> DeviceArray:
    of = (keys, shape, runtime.current_id()) if runtime.several_devices else (keys, shape)
    found = _maps.get(of)
    if found is not None:
        _maps.move_to_end(of)
        return found
    # Written now and once; a graph keeps the memory of what it reads.
    with outside_capture(), streams.current().context():
        encoded = _simulated if runtime.SIMULATED else _encoded
        words = _maps[of] = to_device(np.array([encoded(key) for key in keys]).reshape(shape))
    if len(_maps) > REMEMBERED:
        _maps.popitem(last=False)
    return words


def _simulated(key: Key) -> np.ndarray:
    address, shape, strides, itemsize, box, steps = key
    if any(number % 16 for number in (address, *strides)):
        raise _refused(key, "not a multiple of 16 bytes")
    if 0 in shape or not all(0 < stride < 2**40 for stride in strides):
        raise _refused(key, "an axis is empty, or a stride is not from 16 to 2^40")
    longest = max(n * step for n, step in zip(box, steps, strict=True))
    if longest > 256 or min(box) < 1 or max(steps) > 8:
        raise _refused(key, "an axis of the box is not from 1 to 256")

    def padded(*numbers: int) -> Sizes:
        return (*numbers, 0, 0, 0)[:5]

    fields = (padded(*shape), padded(*strides, itemsize), padded(*box), padded(*steps))
    info = np.array([(address, len(shape), itemsize, *fields)], SIMULATED_MAP)
    return info.view(np.int64)


def _encoded(key: Key) -> np.ndarray:
    driver = runtime.driver()
    address, shape, strides, itemsize, box, steps = key
    line = box[-1] * itemsize
    swizzle = f"{line}B" if line in SWIZZLES else "NONE"
    # Copied as they are, so only the size of the values counts.
    kind = f"CU_TENSOR_MAP_DATA_TYPE_{ {1: 'UINT8', 2: 'UINT16', 4: 'UINT32'}[itemsize] }"
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, kind),
        len(shape),
        address,
        [driver.cuuint64_t(n) for n in reversed(shape)],
        [driver.cuuint64_t(n) for n in reversed(strides)],
        [driver.cuuint32_t(n * step) for n, step in zip(box[::-1], steps[::-1], strict=True)],
        [driver.cuuint32_t(step) for step in reversed(steps)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error) != 0:
        raise _refused(key, error.name)
    return np.array([int(word) for word in encoded.opaque], np.uint64).view(np.int64)


def _refused(key: Key, why: str) -> RuntimeError:
    address, shape, strides, itemsize, box, steps = key
    return RuntimeError(
        f"a tensor map of {shape} at {address:#x}, {itemsize} bytes each, strides {strides}, box "
        f"{box}, steps {steps} was refused: {why}"
    )
