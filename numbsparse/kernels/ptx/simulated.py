"""The instructions in the simulator: what one thread does, with the meaning from `meaning`.

What a GPU would silently do wrong raises here: places outside an array or between multiples
of 16 bytes, global memory for shared, registers of the wrong type.
"""

from operator import index
from typing import Any

import numpy as np

from numbsparse.kernels.ptx import meaning
from numbsparse.kernels.ptx.warp import WARP, WORDS, register, together
from numbsparse.simulator import accesses
from numbsparse.simulator.accesses import begin, synchronizing, waited_for
from numbsparse.simulator.arrays import Global, Memory, extent, note_piece
from numbsparse.simulator.clocks import COPY, Moment
from numbsparse.simulator.threads import current

_FLOAT = np.zeros(1, np.float32)  # one register, in each of its types
_BITS, _HALVES = _FLOAT.view(np.uint32), _FLOAT.view(np.float16)
_TWO_NANS, _NAN_TF32 = np.uint32(0x7FFF7FFF), np.uint32(0x7FFFE000)
_PAIR = np.zeros(2, np.float32)
_PAIR_BITS = _PAIR.view(np.uint32)
_BYTE, _PART, _WORD, _REAL = map(np.dtype, (np.uint8, np.uint16, np.uint32, np.float32))
_MOST_HALF = float(np.finfo(np.float16).max)
_SMALL, _ONE, _INFINITE = np.finfo(np.float32).tiny, np.float32(1), np.float32(np.inf)


def _copies() -> list[list[tuple[np.ndarray, np.ndarray, Moment | None]]]:
    """The groups of copies that the running thread has begun; the last one is not yet committed."""
    copies: Any = current().own.setdefault(_copies, [[]])
    return copies


def cp_async(shared, i, source, j):
    cp_async_zero_fill(shared, i, source, j, 16)


def cp_async_zero_fill(shared, i, source, j, n):
    if not 0 <= n <= 16:
        raise ValueError(f"cp_async_zero_fill takes n from 0 to 16 bytes, got {n}")
    _copy(shared, i, source, j, n, 16)


def cp_async_word(shared, i, source, j, n):
    if not 0 <= n <= 4:
        raise ValueError(f"cp_async_word takes n from 0 to 4 bytes, got {n}")
    _copy(shared, i, source, j, n, 4)


def _copy(shared, i, source, j, n, most):
    copy = begin(COPY)
    target = _piece(_shared(shared), i, most, most, writes=True, moment=copy)
    # Until the wait nobody may read it: 0xFF is a NaN in floating point.
    target[:] = 0xFF
    _copies()[-1].append((target, _piece(_global(source), j, n, most, moment=copy), copy))


def cp_async_commit():
    _copies().append([])


def cp_async_wait(n):
    groups, over = _copies(), []
    while len(groups) - 1 > n:
        for target, source, copy in groups.pop(0):
            target[: source.size] = source
            target[source.size :] = 0
            over.append(copy)
    waited_for(over)


def _ldmatrix(which, count=4):
    return lambda shared, i: together(which, _row(shared, i), registers=True)[:count]


ldmatrix_x4, ldmatrix_x2 = (_ldmatrix(meaning.ldmatrix_x4, n) for n in (4, 2))
ldmatrix_x4_trans, ldmatrix_x2_trans = (_ldmatrix(meaning.ldmatrix_x4_trans, n) for n in (4, 2))


def _ldmatrix_if(which):
    def ldmatrix(shared, i, wanted, r0, r1, r2, r3):
        kept = _registers(np.uint32, wanted, r0, r1, r2, r3)
        return together(which, _row(shared, i), kept[0], kept[1:], registers=True)

    return ldmatrix


ldmatrix_x4_if = _ldmatrix_if(meaning.ldmatrix_x4_if)
ldmatrix_x4_trans_if = _ldmatrix_if(meaning.ldmatrix_x4_trans_if)


def _stmatrix(which):
    def stmatrix(shared, i, r0, r1, r2, r3):
        rows = together(which, _registers(np.uint32, r0, r1, r2, r3))
        _row(shared, i, writes=True)[:] = rows

    return stmatrix


stmatrix_x4, stmatrix_x4_trans = map(_stmatrix, (meaning.stmatrix_x4, meaning.stmatrix_x4_trans))


def movmatrix_trans(value):
    return together(meaning.movmatrix_trans, _registers(np.uint32, value)[0])


def _mma(which):
    kinds = (np.uint32, 4), (np.uint32, 2), (np.float32, 4)  # a, b, c

    def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        return together(which, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, registers=True, kinds=kinds)

    return mma


mma_m16n8k16_f16 = _mma(meaning.mma_m16n8k16_f16)
mma_m16n8k16_bf16 = _mma(meaning.mma_m16n8k16_bf16)
mma_m16n8k8_tf32 = _mma(meaning.mma_m16n8k8_tf32)


def load_4xf32(array, j):
    if array.dtype != _REAL:
        raise TypeError(f"load_4xf32 takes an array of float32, got {array.dtype}")
    flat, k = _place(array, j, 16, 16, _REAL, 4)
    return flat[k], flat[k + 1], flat[k + 2], flat[k + 3]


def load_4xu32(array, j):
    flat, k = _place(array, j, 16, 16, _WORD, 4)
    return flat[k], flat[k + 1], flat[k + 2], flat[k + 3]


def load_2xu32(array, j):
    flat, k = _place(array, j, 8, 8, _WORD, 4)
    return flat[k], flat[k + 1]


def load_1xu32(array, j):
    flat, k = _place(array, j, 4, 4, _WORD, 4)
    return (flat[k],)


def store_4xf32(array, j, v0, v1, v2, v3):
    if array.dtype != _REAL:
        raise TypeError(f"store_4xf32 takes an array of float32, got {array.dtype}")
    _store_four(array, j, _REAL, np.float32, v0, v1, v2, v3)


def store_4xu32(array, j, v0, v1, v2, v3):
    _store_four(array, j, _WORD, np.uint32, v0, v1, v2, v3)


def store_2xu32(array, j, v0, v1):
    if not type(v0) is type(v1) is np.uint32:
        _registers(np.uint32, v0, v1)
    flat, k = _place(array, j, 8, 8, _WORD, 4, writes=True)
    flat[k], flat[k + 1] = v0, v1


def cvt_rna_tf32(x):
    _FLOAT[0] = register(np.float32, x)
    half = 0x1000 if -_INFINITE < x < _INFINITE else 0
    _BITS[0] = int(_BITS[0]) + half & 0xFFFFE000
    return _BITS[0]


def cvt_rn_tf32(x):
    _FLOAT[0] = register(np.float32, x)
    if x != x:
        return _NAN_TF32
    bits = int(_BITS[0])
    half = 0xFFF + (bits >> 13 & 1) if -_INFINITE < x < _INFINITE else 0
    _BITS[0] = bits + half & 0xFFFFE000
    return _BITS[0]


def pack_half2(lo, hi):
    lo, hi = register(np.float32, lo), register(np.float32, hi)
    if abs(float(lo)) <= _MOST_HALF and abs(float(hi)) <= _MOST_HALF:  # as most are
        _HALVES[0], _HALVES[1] = lo, hi
        return _BITS[0]
    if lo != lo and hi != hi:  # as memory is that nobody wrote
        return _TWO_NANS
    return meaning.pack_half2(lo, hi)[()]


def pack_bfloat2(lo, hi):
    lo, hi = register(np.float32, lo), register(np.float32, hi)
    if lo == lo and hi == hi:  # as most are; with integers of Python's in a tenth of the time
        _PAIR[0], _PAIR[1] = lo, hi
        low, high = _PAIR_BITS.tolist()
        low, high = low + 0x7FFF + (low >> 16 & 1), high + 0x7FFF + (high >> 16 & 1)
        _BITS[0] = low >> 16 | high & 0xFFFF0000
        return _BITS[0]
    if lo != lo and hi != hi:
        return _TWO_NANS
    return meaning.pack_bfloat2(lo, hi)[()]


def ex2(x):
    if register(np.float32, x) < 128:
        return np.exp2(x)
    with np.errstate(over="ignore"):
        return np.exp2(x)


def rcp(x):
    if abs(register(np.float32, x)) > _SMALL:
        return _ONE / x
    with np.errstate(divide="ignore", over="ignore"):
        return _ONE / x


def unpack_half2(word):
    _BITS[0] = register(np.uint32, word)
    _PAIR[0], _PAIR[1] = _HALVES
    return _PAIR[0], _PAIR[1]


def unpack_bfloat2(word):
    _BITS[0] = register(np.uint32, word)
    return tuple(meaning.float32_of_bfloat16(_BITS))


def as_uint32(x):
    _FLOAT[0] = x if type(x) is np.float32 else register(np.float32, x)
    return _BITS[0]


def as_float32(bits):
    _BITS[0] = bits if type(bits) is np.uint32 else register(np.uint32, bits)
    return _FLOAT[0]


def shfl_xor(value, mask):
    return together(meaning.shfl_xor, _any_register(value), mask)


def shfl_idx(value, source):
    return together(meaning.shfl_idx, _any_register(value), source)


def redux_or(value):
    return together(meaning.redux_or, _registers(np.uint32, value)[0])


def sync_warp():
    thread = current()
    with synchronizing(thread.block, "warp", thread.thread_id // WARP):
        together(meaning.sync_warp, 0)


def sync_some(barrier, count):
    if not 0 < barrier < 16 or count % WARP:
        raise ValueError(f"barriers 1 to 15 of whole warps are taken, got {barrier}, {count}")
    thread, of = current(), int(count)
    with synchronizing(thread.block, "some", of, thread.thread_id // of):
        together(meaning.sync_warp, 0, of=of)


def _store_four(array, j, dtype, kind, v0, v1, v2, v3):
    flat, k = _place(array, j, 16, 16, dtype, 4, writes=True)
    if not type(v0) is type(v1) is type(v2) is type(v3) is kind:
        _registers(kind, v0, v1, v2, v3)
    flat[k], flat[k + 1], flat[k + 2], flat[k + 3] = v0, v1, v2, v3  # in a third of an array's time


def _registers(dtype, *values):
    for value in values:
        if type(value) is not dtype:
            register(dtype, value)
    return np.frombuffer(b"".join(values), dtype)


def _any_register(value):
    if type(value) not in WORDS:
        raise TypeError(f"a register of 32 bits got {type(value).__name__} {value!r}")
    return value


def _row(shared, i, writes=False):
    """Eight 16-bit values of shared memory."""
    flat, k = _place(_shared(shared), i, 16, 16, _PART, 2, writes=writes)
    return flat[k : k + 8]


def _shared(array):
    if isinstance(array, Global):
        raise TypeError("a shared array is taken here, got one in global memory")
    return array


def _global(array):
    if not isinstance(array, Global):
        raise TypeError("an array in global memory is taken here, got a shared or local one")
    return array


def _piece(array, i, nbytes, align=16, writes=False, moment=None):
    """The `nbytes` bytes from item i of the flat array on, as a view; it starts aligned."""
    nbytes = index(nbytes)
    flat, k = _place(array, i, nbytes, align, _BYTE, 1, writes, moment)
    return flat[k : k + nbytes]


def _place(array, i, nbytes, align, dtype, width, writes=False, moment=None):
    """The array as items of that type, of `width` bytes, and which of them item i begins with.

    `nbytes` bytes are read or written from there on; it starts aligned.
    """
    of = array.extent if isinstance(array, Memory) else (*extent(array), None)
    address, itemsize, size, flats = of
    start = index(i) * itemsize if nbytes else 0
    if not 0 <= start <= size - nbytes:
        raise IndexError(f"{nbytes} bytes from item {i} are outside an array of {array.size}")
    if nbytes and (address + start) % align:
        raise ValueError(f"item {i} does not start at a multiple of {align} bytes")
    if accesses.watcher is not None:
        note_piece(array, writes, address + start, nbytes, moment)
    if flats is None or start % width:
        return np.ndarray(nbytes // width, dtype, array, start), 0
    flat = flats.get(dtype)
    if flat is None:  # once: a view takes longer than what is done with it
        whole = np.asarray(array).reshape(-1).view(_BYTE)[: size // width * width]
        flat = flats[dtype] = whole.view(dtype)
    return flat, start // width


def flat_bytes(array):
    """The bytes of an array, as a view that knows its address; the same one where it is kept."""
    known = isinstance(array, Memory) and array.extent[3] is not None
    return (array if known else array.view(Memory)).flat_bytes
