"""Blocks of w times their gates, packed (`parts.packed`) without those whose gate is zero.

A block of threads has a stage of the plan. The steps of each column move together, and those that
have two blocks are put together anew, so that a stage has fewer; where it begins stays. So it is
all the same whether it is the host or only the GPU that knows the gates.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import (
    ALIGNED,
    COUNT_BITS,
    INSIDE_BITS,
    MOST_STEPS,
    Strip,
)
from numbsparse.kernels.parts.packed import RUN, packing
from numbsparse.kernels.ptx import let_next_kernel_start, wait_for_earlier_kernels

# A stage of the strips of 8,192 features has some 350 steps: 4 warps took 40 us (H200).
THREADS = 64 if SIMULATED else 512


def packed_by_gates(
    values: DeviceArray,
    codes: DeviceArray,
    words: DeviceArray,
    begins: DeviceArray,
    gates: DeviceArray,
    strip: Strip,
    transposed: bool,
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """(w, words, begins) of the steps that are left, of each stage where they begin and end."""
    n_stages = begins.size - 1
    w = empty((codes.size // strip.BLOCKS_A_STEP * strip.STEP_BYTES // 4,), "uint32")
    left, ends = empty(words.shape, "uint32"), empty((2 * n_stages,), "int32")
    kernel = gate_kernel(strip, transposed, values.dtype.name)
    args = values.view("uint32"), codes, words, begins, gates, w, left, ends
    launch(kernel, n_stages, THREADS, *args, overlap=True)
    return w, left, ends


@cache
def gate_kernel(strip: Strip, transposed: bool, dtype: str) -> Any:
    """blocks, places : the codes and words of a stage, before and after; by the columns of its
    warps, in turn, which `firsts` says where and `counts` how many steps they have after."""
    A_STEP, WARPS, COLUMNS, HEAD = strip.BLOCKS_A_STEP, strip.WARPS, strip.COLUMNS, strip.HEAD
    LINES, INSIDE, COUNT = WARPS * COLUMNS, (1 << INSIDE_BITS) - 1, (1 << COUNT_BITS) - 1
    NOWHERE, HALF = strip.GROUPS * strip.GROUP_BYTES, 0xFFFF
    STEPS, PLACES = (2, MOST_STEPS * A_STEP), (2, MOST_STEPS)
    pack = packing(strip.B, strip.ITEM, transposed, INSIDE_BITS, dtype)

    @cuda.jit(device=True)
    def count_of(word, column):
        return int32(word >> uint32(COUNT_BITS * column) & uint32(COUNT))

    @cuda.jit(device=True)
    def move(first, many, to, blocks, places):
        """The blocks of a column's steps that are left, from step `to` on; its steps then."""
        n = 0
        for entry in range(first * A_STEP, (first + many) * A_STEP):
            step, half = entry // A_STEP, entry % A_STEP
            if blocks[0, entry] != 0:
                own, at = places[0, step], to + n // A_STEP
                blocks[1, to * A_STEP + n] = blocks[0, entry]
                if A_STEP == 2:
                    place = uint32(own >> uint32(16 * half) & uint32(HALF))
                    rest = uint32(NOWHERE << 16) if n % 2 == 0 else places[1, at] & uint32(HALF)
                    own = uint32(rest | place << uint32(16 * (n % 2)))
                places[1, at] = own
                n += 1
        if n % A_STEP:
            blocks[1, to * A_STEP + n] = int32(0)

    @cuda.jit
    def kernel(values, codes, words, begins, gates, w, left, ends):
        blocks, places = cuda.shared.array(STEPS, int32), cuda.shared.array(PLACES, uint32)
        firsts, counts = cuda.shared.array(LINES, int32), cuda.shared.array(LINES, int32)
        stage, t = int64(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        begin, end = begins[stage], begins[stage + 1]
        head, many = begin + stage * HEAD, end - begin
        wait_for_earlier_kernels()
        let_next_kernel_start()
        for step in range(t, many, THREADS):
            places[0, step] = words[head + HEAD + step]
            for half in range(A_STEP):
                code = codes[(begin + step) * A_STEP + half]
                there = code & INSIDE and gates[code >> INSIDE_BITS] != 0
                blocks[0, step * A_STEP + half] = code if there else int32(0)
        for line in range(t, LINES, THREADS):
            word, before = words[head + line // COLUMNS], int32(0)
            for column in range(line % COLUMNS):
                before += count_of(word, column)
            firsts[line] = int32(word >> uint32(4 * COUNT_BITS)) + before
        cuda.syncthreads()
        for line in range(t, LINES, THREADS):
            n, word = 0, words[head + line // COLUMNS]
            first = firsts[line] * A_STEP
            for entry in range(first, first + count_of(word, line % COLUMNS) * A_STEP):
                n += 1 if blocks[0, entry] != 0 else 0
            counts[line] = (n + A_STEP - 1) // A_STEP
        cuda.syncthreads()
        total = int32(0)
        for line in range(LINES):
            total += counts[line]
        for line in range(t, LINES, THREADS):
            to, word = int32(0), words[head + line // COLUMNS]
            for other in range(line):
                to += counts[other]
            many_of_line = count_of(word, line % COLUMNS)
            move(firsts[line], many_of_line, to, blocks, places)
            if line % COLUMNS == 0:
                own = uint32(to << (4 * COUNT_BITS))
                for column in range(COLUMNS):
                    own = uint32(own | uint32(counts[line + column] << (COUNT_BITS * column)))
                left[head + line // COLUMNS] = own
        for k in range(WARPS + t, HEAD, THREADS):
            left[head + k] = uint32(0)
        cuda.syncthreads()
        last = (total + ALIGNED - 1) // ALIGNED * ALIGNED
        for step in range(t, last, THREADS):
            left[head + HEAD + step] = places[1, step] if step < total else uint32(0)
        if t == 0:
            ends[2 * stage], ends[2 * stage + 1] = begin, begin + last
        for step in range(t // 32 * RUN, total, THREADS // 32 * RUN):
            pack(values, blocks[1], total, step, gates, w, int64(begin))

    return kernel
