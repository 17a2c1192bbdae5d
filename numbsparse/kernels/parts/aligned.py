"""Rows that `cp.async` and the copy engine can read: contiguous, from multiples of 16 bytes on."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.elementwise import copy, fill
from numbsparse.kernels.ptx import let_next_kernel_start, wait_for_earlier_kernels

BYTES, WORD = 16, 4  # of one copy, and of one that begins anywhere
LINE = 128  # of a cache line: longer rows of copies begin at one, shorter ones lie within one
MOST, WARPS = 384, 8  # items of a row that a warp copies at most, warps of a block
# Of a copy in the other order, through tiles in shared memory: columns and rows of a tile; threads.
SIDE, HIGH, THREADS = 64, 32, 256


class Move(NamedTuple):
    """As one argument of a kernel: out[i * out_stride + j] = x[i * stride + j * step]."""

    shape: tuple[int, ...]
    part: int  # of a row, that a warp copies
    out: Any
    x: Any
    out_stride: int
    stride: int
    step: int


def aligned_either_way(*arrays: DeviceArray) -> tuple[list[DeviceArray], list[bool]]:
    """Of one or two each x, or x.T where the batch is contiguous, or an aligned copy of it; and
    whether it is x.T."""
    across = [x.batch_is_contiguous for x in arrays]
    lines = (x.T if t else x for x, t in zip(arrays, across, strict=True))
    return aligned_together(*lines), across


def aligned(x: DeviceArray) -> DeviceArray:
    """x (rows, width), or a copy unless it is aligned."""
    return aligned_together(x)[0]


def aligned_together(*arrays: DeviceArray) -> list[DeviceArray]:
    """One or two arrays, each as it is or an aligned copy; two are copied by one launch."""
    found = [x if is_aligned(x) else aligned_like(x) for x in arrays]
    copies = [(to, x) for to, x in zip(found, arrays, strict=True) if to is not x]
    if copies:
        copy_matrices(*copies)
    return found


def aligned_like(x: DeviceArray) -> DeviceArray:
    return padded_like(x)[:, : x.shape[1]]


def padded_like(x: DeviceArray) -> DeviceArray:
    """As many rows, so much longer that each is aligned, and of up to LINE bytes in one line.

    Of 17 to 55 rows products of small blocks so took an H200 0.82 to 1.0 of the time that they took
    with multiples of 16 bytes, 0.93 at the mean of 15 drawn ones.
    """
    rows, width = x.shape
    run = min(max(1 << (width * x.itemsize - 1).bit_length(), BYTES), LINE) // x.itemsize
    return empty((rows, -(-width // run) * run), x.dtype)


def copy_matrices(*copies: tuple[DeviceArray, DeviceArray]) -> None:
    """out[:] = x of one or two (out, x) of a dtype, where rows of `out` are gapless.

    In parts of rows that are as long each, and no longer than can be awaited at once.
    """
    copies = tuple((out, x) for out, x in copies if 0 not in x.shape)
    if not copies:
        return
    moves, grids = list[Any](), []
    for out, x in copies:
        rows, width = x.shape
        parts = -(-width // MOST)
        part = -(-width // (32 * parts)) * 32
        out_stride, *strides = (n // x.itemsize for n in (out.strides[0], *x.strides))
        moves.append(Move(x.shape, part, of_bits(out.span), of_bits(x.span), out_stride, *strides))
        grids.append((-(-rows // WARPS), parts))
    contiguous = all(x.strides[1] == x.itemsize for _, x in copies)
    how = copies[0][1].itemsize, copy_engine(), contiguous
    grid = sum(blocks for blocks, _ in grids), max(parts for _, parts in grids)
    both = moves[0], moves[-1], grids[0][0]
    launch(matrices_kernel(*how), grid, (32, WARPS), *both, overlap=copy_engine())


@cache
def matrices_kernel(size: int, overlap: bool, contiguous: bool) -> Any:
    """One matrix, or two, whose second one begins after so many blocks of threads.

    A warp has a part of a row, and awaits all of it at once: 1.4 to 3.5 times as fast as
    `elementwise.copy` (H200), but for few rows of a transposed x; and in parts of even length in
    0.66 to 0.88 of the time that parts of 256 took.
    """
    EACH, DTYPE = MOST // 32, uint16 if size == 2 else float32

    @cuda.jit(device=True)
    def move(block, whole):
        shape, part, out, x, out_stride, stride, step = whole
        own = cuda.local.array(EACH, DTYPE)
        row = int64(block) * WARPS + cuda.threadIdx.y
        begin = int64(cuda.blockIdx.y) * part
        first = begin + cuda.threadIdx.x
        left = min(begin + part, shape[1]) - first if row < shape[0] else int64(0)
        if contiguous:
            step = 1
        here, there = row * stride + first * step, row * out_stride + first
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        for k in range(EACH):
            if 32 * k < left:
                own[k] = x[uint64(here + k * (32 * step))]
        for k in range(EACH):
            if 32 * k < left:
                out[uint64(there + 32 * k)] = own[k]

    @cuda.jit
    def kernel(one, other, blocks):
        if cuda.blockIdx.x < blocks:
            move(cuda.blockIdx.x, one)
        else:
            move(cuda.blockIdx.x - blocks, other)

    return kernel


def is_aligned(x: DeviceArray) -> bool:
    """Whether x (rows, width) can be read as it is; repeated rows, of stride 0, cannot."""
    rows, width = x.shape
    stride = x.strides[0] if rows > 1 else BYTES
    contiguous = width <= 1 or x.strides[1] == x.itemsize
    return contiguous and stride > 0 and x.address % BYTES == stride % BYTES == 0


def aligned_in_place(*arrays: DeviceArray) -> list[DeviceArray]:
    """Each x (rows, width), or a copy unless it or x.T is aligned; two are copied by one launch."""
    across = [not is_aligned(x) and (is_aligned(x.T) or x.batch_is_contiguous) for x in arrays]
    lines = aligned_together(*(x.T if t else x for x, t in zip(arrays, across, strict=True)))
    return [line.T if t else line for line, t in zip(lines, across, strict=True)]


def is_gapless(x: DeviceArray) -> bool:
    """Whether x.T has no gaps, and it and every eighth of its rows begin at 16 bytes."""
    return x.strides == (x.itemsize, x.shape[0] * x.itemsize) and x.address % BYTES == 0


def aligned_values(values: DeviceArray) -> DeviceArray:
    """Contiguous values, or a copy unless they begin at a multiple of 16 bytes."""
    if values.address % BYTES == 0:
        return values
    moved = empty(values.shape, values.dtype)
    copy(moved, values)
    return moved


def of_any_blocks(compute: Callable[..., None]) -> Callable[..., None]:
    """A decorator of y = x @ w, (x, values, index, y, ...): y is 0 where there is no block."""

    @wraps(compute)
    def product(x: Any, values: Any, index: Any, y: Any, *how: Any) -> None:
        if 0 in y.shape:
            return
        if values.shape[0] == 0:
            fill(y, 0)
        else:
            compute(x, values, index, y, *how)

    return product


def of_any_rows(compute: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of a weight-gradient, (x, dy, index, dvalues, ...): dvalues is 0 for no rows, and
    may begin anywhere. Where nothing is computed it returns True."""

    @wraps(compute)
    def weight_grad(x: Any, dy: Any, index: Any, dvalues: DeviceArray, *how: Any) -> Any:
        if dvalues.size == 0 or x.shape[0] == 0:
            fill(dvalues, 0)
            return True
        if dvalues.address % BYTES == 0:
            return compute(x, dy, index, dvalues, *how)
        moved = empty(dvalues.shape, dvalues.dtype)
        result = compute(x, dy, index, moved, *how)
        copy(dvalues, moved)
        return result

    return weight_grad


def of_bits(a: DeviceArray) -> DeviceArray:
    """16-bit values as uint16, which NumPy knows too."""
    return a.view("uint16") if a.itemsize == 2 else a


def readable(x: DeviceArray) -> tuple[DeviceArray, bool]:
    """x, or a copy, as the copy engine reads it: (..., whether it is feature-major).

    k7 took 0.82 and 0.84 of the time so (129 and 513 rows of 4,096 features, H200), in float32 0.76
    and 0.69; k9 1.16.
    """
    x = of_bits(x)
    if x.batch_is_contiguous and not is_aligned(x.T):
        x = transposed_copy(x.T).T  # copied anyway, and so its tiles are even
    (lines,), (across,) = aligned_either_way(x)
    return lines, across


def transposed_copy(x: DeviceArray) -> DeviceArray:
    """A copy of x (rows, columns); its columns are contiguous, each aligned."""
    rows, columns = x.shape
    whole = padded_like(x.T)
    strides = tuple(n // x.itemsize for n in x.strides)
    how = x.itemsize, copy_engine(), strides[1] == 1
    grid, kind = (-(-columns // SIDE), -(-rows // HIGH)), f"uint{8 * x.itemsize}"
    out, stride = whole.view("uint32").span, whole.strides[0] // WORD
    args = x.span.view(kind), strides, x.shape, out, stride
    launch(transposing_kernel(*how), grid, THREADS, *args, overlap=copy_engine())
    return whole[:, :rows].T


@cache
def transposing_kernel(item: int, overlap: bool, contiguous: bool) -> Any:
    """A tile has words of RUN columns, `out` words of as many rows, so that 16-bit values take half
    as many instructions, by which the kernel is limited: 0.5 to 0.8 of the time (H200)."""
    RUN = WORD // item  # values of a word
    WORDS, TALL = SIDE // RUN, HIGH // RUN  # of a row of the tile, of a column of `out`
    ROWS, COLUMNS = THREADS // WORDS, THREADS // TALL  # that are read, and written, at once
    STEPS, TURNS, TILE = HIGH // ROWS, WORDS // COLUMNS, (HIGH, WORDS + 1)

    @cuda.jit
    def kernel(x, strides, shape, out, stride):
        tile, own = cuda.shared.array(TILE, uint32), cuda.local.array((STEPS, RUN), uint32)
        slow, fast = uint32(cuda.threadIdx.x) // WORDS, uint32(cuda.threadIdx.x) % WORDS
        column, row = int64(cuda.blockIdx.x) * SIDE, int64(cuda.blockIdx.y) * HIGH
        next_column, next_rows = 1 if contiguous else strides[1], ROWS * strides[0]
        first = column + RUN * fast
        here = (row + slow) * strides[0] + first * next_column
        left = int32(min(shape[1] - first, RUN))
        rows = int32(min(shape[0] - row - slow, HIGH))
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        for k in range(STEPS):  # all of it is awaited at once
            for r in range(RUN):
                if ROWS * k < rows and r < left:
                    own[k, r] = x[uint64(here + r * next_column)]
            here += next_rows
        for k in range(STEPS):
            high = own[k, 1] << uint32(16) if RUN == 2 else uint32(0)
            tile[slow + ROWS * k, fast] = own[k, 0] | high
        cuda.syncthreads()
        slow, fast = uint32(cuda.threadIdx.x) // TALL, uint32(cuda.threadIdx.x) % TALL
        first = column + RUN * slow
        there, next_columns = first * stride + row // RUN + fast, RUN * COLUMNS * stride
        left = int32(min(shape[1] - first, SIDE)) if row + RUN * fast < shape[0] else int32(0)
        for k in range(TURNS):
            one = tile[RUN * fast, slow + COLUMNS * k]
            if RUN == 1:
                if COLUMNS * k < left:
                    out[uint64(there)] = one
            else:
                other = tile[RUN * fast + 1, slow + COLUMNS * k]
                if RUN * COLUMNS * k < left:
                    out[uint64(there)] = one & uint32(0xFFFF) | other << uint32(16)
                if RUN * COLUMNS * k + 1 < left:
                    out[uint64(there + stride)] = one >> uint32(16) | other & uint32(0xFFFF0000)
            there += next_columns

    return kernel
