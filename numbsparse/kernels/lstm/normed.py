"""The gates of a step with layer norm on a GPU, one launch each way.

A row of the batch has a block of threads, or a cluster of them where it is long. A thread keeps
the gates of its units in registers while all find the sums over them: forward those of each gate,
then of the squares about their mean, which are joined with those of the cluster's other blocks;
backward of the gradient, and of its products with what is normalised.
"""

import math
from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.device import SIMULATED, multiprocessors
from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import LEAST_THREADS, WARP
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.lstm.on_gpu import activated, cell_grad, tanh
from numbsparse.kernels.ptx import (
    cluster_sync,
    let_next_kernel_start,
    load_4xf32_at,
    wait_for_earlier_kernels,
)
from numbsparse.kernels.smooth import ONE
from numbsparse.kernels.sums import adding

MOST_THREADS, AT_ONCE = (8, 8) if SIMULATED else (512, 1024)  # of a block; of a multiprocessor
UNITS = 2  # of a thread, as long as a cluster may have more blocks
MOST_BLOCKS = 8
MOST_WARPS = MOST_THREADS // WARP
SUMS = 2 * GATES
SCRATCH = MOST_WARPS * SUMS  # float32 in shared memory
NONE = float32(0)
LIMITS = {} if SIMULATED else {"launch_bounds": (MOST_THREADS, 1)}


def forward(
    gates, recurrent, bias, kept, c_before, c, h, block_size, gain, eps, inverse_std
):  # fmt: skip
    """One step, as `on_gpu.forward`, with z = n * gain + bias.

    gates[:] = n, which is (s - mean(s)) * inverse_std of s = gates + recurrent over each gate's
    units, inverse_std (batch, 4) = 1 / sqrt(variance(s) + eps).
    """
    batch, units = h.shape
    blocks, threads, items, _ = shares(batch, units)
    arrays = gates, recurrent, bias, gain, h if kept is None else kept, c_before, c, h, inverse_std
    sizes = units, gates.shape[1], block_size
    kernel = forward_kernel(kept is not None, items, blocks, copy_engine())
    _launch(kernel, blocks, batch, threads, *(a.span for a in arrays), eps, *sizes)


def backward(
    gates, bias, kept, c_before, c, dy, dh, dc, dgates, dbias, block_size, gain, inverse_std, dgain
):  # fmt: skip
    """As `on_gpu.backward`: dgates[:] = the gradient of the s of `forward`.

    That of the gain is added to dgain, float32 (parts(batch, units), 4 * width), as to dbias.
    """
    batch, units = c.shape
    blocks, threads, items, rows = shares(batch, units)
    arrays = gates, bias, gain, c if kept is None else kept, c_before, c, dy, dh, dc, dgates
    flat = (a.span for a in (*arrays, inverse_std, dbias, dgain))
    sizes = batch, units, gates.shape[1], block_size
    kernel = backward_kernel(kept is not None, items, blocks, rows, copy_engine())
    _launch(kernel, blocks, dbias.shape[0], threads, *flat, *sizes)


def _launch(kernel, blocks, rows, threads, *args):
    cluster = (blocks, 1) if blocks > 1 else None
    launch(kernel, (blocks, rows), threads, *args, cluster=cluster, overlap=copy_engine())


def parts(batch: int, units: int) -> int:
    """In how many parts the gradients of bias and gain are summed."""
    return -(-batch // shares(batch, units)[3])


def shares(batch: int, units: int) -> tuple[int, int, int, int]:
    """Blocks of threads of a row, their threads, units of a thread, and rows that a block takes.

    There is a thread for each gate at least, whose scale it stores. Rows are of gradients alone.
    """
    blocks, at_once = 1, 2 if SIMULATED else multiprocessors()
    while copy_engine() and blocks < MOST_BLOCKS and units > blocks * MOST_THREADS * UNITS:
        blocks *= 2
    span = -(-units // blocks)
    threads = min(max(-(-span // LEAST_THREADS) * LEAST_THREADS, GATES), MOST_THREADS)
    rows = -(-batch * blocks * threads // (at_once * AT_ONCE))
    return blocks, threads, -(-span // threads), max(rows, 1)


@cuda.jit(device=True)
def show(values, shown):
    """Eight values of this block, to the others of the cluster."""
    if cuda.threadIdx.x == 0:
        for k in range(SUMS):
            shown[k] = values[k]
    cluster_sync()


@cuda.jit(device=True)
def of_block(shown, rank, values):
    """What that block of the cluster shows."""
    for k in range(0, SUMS, 4):
        a, b, c, d = load_4xf32_at(shown, uint32(k), uint32(rank))
        values[k], values[k + 1], values[k + 2], values[k + 3] = a, b, c, d


@cache
def statistics_of(ITEMS: int, BLOCKS: int) -> Any:
    """find(z, many, units, scratch, shown, mean, scale, eps): each gate's, over all units.

    Sums of squares about a block's own mean, and of the means about that of all, do not cancel.
    """
    add = adding(GATES, MOST_WARPS)

    @cuda.jit(device=True)
    def find(z, many, units, scratch, shown, mean, scale, eps):
        t, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        sums, own = cuda.local.array(SUMS, float32), cuda.local.array(SUMS, float32)
        for k in range(GATES):
            mean[k], scale[k] = NONE, NONE
        for i in range(ITEMS):
            if t + i * threads < many:
                for k in range(GATES):
                    mean[k] += z[i, k]
        add(mean, scratch)
        for k in range(GATES):
            sums[k] = mean[k]
            mean[k] /= float32(many)
        for i in range(ITEMS):
            if t + i * threads < many:
                for k in range(GATES):
                    centred = z[i, k] - mean[k]
                    scale[k] += centred * centred
        add(scale, scratch)
        if BLOCKS > 1:
            for k in range(GATES):
                sums[GATES + k] = scale[k]
                mean[k], scale[k] = NONE, NONE
            show(sums, shown)
            for rank in range(BLOCKS):
                of_block(shown, rank, own)
                for k in range(GATES):
                    mean[k] += own[k]
            for k in range(GATES):
                mean[k] /= float32(units)
            for rank in range(BLOCKS):
                of_block(shown, rank, own)
                count = float32(units_of(units, rank, BLOCKS))
                for k in range(GATES):
                    apart = own[k] / count - mean[k]
                    scale[k] += own[GATES + k] + count * apart * apart
        for k in range(GATES):
            scale[k] = ONE / math.sqrt(scale[k] / float32(units) + eps)

    return find


@cuda.jit(device=True)
def place(unit, B):
    """Where the input gate of a unit is among the gates; the others follow, a block each."""
    return unit + int64(uint32(unit) // uint32(B)) * ((GATES - 1) * B)


@cuda.jit(device=True)
def span_of(units, blocks):
    return (units + blocks - 1) // blocks


@cuda.jit(device=True)
def units_of(units, rank, blocks):
    """How many of them that block of the cluster has."""
    span = span_of(units, blocks)
    return min(span, units - rank * span)


@cache
def forward_kernel(dropped: bool, ITEMS: int, BLOCKS: int, OVERLAP: bool) -> Any:
    find = statistics_of(ITEMS, BLOCKS)

    @cuda.jit(**LIMITS)
    def kernel(
        gates, recurrent, bias, gain, kept, c_before, c, h, inverse_std, eps, units, columns, B
    ):  # fmt: skip
        scratch = cuda.shared.array(SCRATCH, float32)
        shown = cuda.shared.array(SUMS, float32)
        z = cuda.local.array((ITEMS, GATES), float32)
        weight = cuda.local.array((ITEMS, GATES), float32)
        shift = cuda.local.array((ITEMS, GATES), float32)
        before, share = cuda.local.array(ITEMS, float32), cuda.local.array(ITEMS, float32)
        mean, scale = cuda.local.array(GATES, float32), cuda.local.array(GATES, float32)
        t, threads, rank = int64(cuda.threadIdx.x), int64(cuda.blockDim.x), int64(cuda.blockIdx.x)
        row, many = int64(cuda.blockIdx.y), units_of(units, rank, BLOCKS)
        if OVERLAP:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        first, of_row, of_states = rank * span_of(units, BLOCKS), row * columns, row * units
        for i in range(ITEMS):
            unit = first + min(t + i * threads, many - 1)
            at = place(unit, B)
            before[i] = c_before[of_states + unit]
            share[i] = widened(kept[of_states + unit]) if dropped else ONE
            for k in range(GATES):
                own = at + k * B
                z[i, k] = widened(gates[of_row + own]) + widened(recurrent[of_row + own])
                weight[i, k], shift[i, k] = widened(gain[own]), widened(bias[own])
        find(z, many, units, scratch, shown, mean, scale, eps)
        if t < GATES and rank == 0:
            inverse_std[row * GATES + t] = scale[t]
        for i in range(ITEMS):
            own = t + i * threads
            if own < many:
                at = of_row + place(first + own, B)
                for k in range(GATES):
                    n = (z[i, k] - mean[k]) * scale[k]
                    gates[at + k * B] = rounded(n, gates)
                    z[i, k] = n * weight[i, k] + shift[i, k]
                a_i, a_f, a_g, a_o = activated(z[i, 0], z[i, 1], z[i, 2], z[i, 3])
                state = a_f * before[i] + a_i * a_g * share[i]
                c[of_states + first + own] = state
                h[of_states + first + own] = rounded(a_o * tanh(state), h)
        if BLOCKS > 1:
            cluster_sync()  # what a block shows is there until all have read it

    return kernel


@cache
def backward_kernel(dropped: bool, ITEMS: int, BLOCKS: int, ROWS: int, OVERLAP: bool) -> Any:
    of_row = gradients_of_row(dropped, ITEMS, BLOCKS)

    @cuda.jit(**LIMITS)
    def kernel(
        gates, bias, gain, kept, c_before, c, dy, dh, dc, dgates, inverse_std, dbias, dgain,
        batch, units, columns, B
    ):  # fmt: skip
        scratch = cuda.shared.array(SCRATCH, float32)
        shown = cuda.shared.array(SUMS, float32)
        weight = cuda.local.array((ITEMS, GATES), float32)
        shift = cuda.local.array((ITEMS, GATES), float32)
        of_bias = cuda.local.array((ITEMS, GATES), float32)
        of_gain = cuda.local.array((ITEMS, GATES), float32)
        t, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        rank, part = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        if OVERLAP:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        first, many = rank * span_of(units, BLOCKS), units_of(units, rank, BLOCKS)
        for i in range(ITEMS):
            at = place(first + min(t + i * threads, many - 1), B)
            for k in range(GATES):
                own = at + k * B
                weight[i, k], shift[i, k] = widened(gain[own]), widened(bias[own])
                of_bias[i, k] = dbias[part * columns + own]
                of_gain[i, k] = dgain[part * columns + own]
        arrays = gates, kept, c_before, c, dy, dh, dc, dgates, inverse_std
        affine, own_sums, shared = (weight, shift), (of_bias, of_gain), (scratch, shown)
        for row in range(part * ROWS, min((part + 1) * ROWS, batch)):
            of_row(arrays, affine, own_sums, shared, row, units, columns, B)
        for i in range(ITEMS):
            own = t + i * threads
            if own < many:
                at = part * columns + place(first + own, B)
                for k in range(GATES):
                    dbias[at + k * B], dgain[at + k * B] = of_bias[i, k], of_gain[i, k]

    return kernel


@cache
def gradients_of_row(dropped: bool, ITEMS: int, BLOCKS: int) -> Any:
    """run(arrays, affine, own_sums, shared, row, units, columns, B): dgates and dc of a row.

    Those of bias and gain are added to own_sums.
    """
    add = adding(SUMS, MOST_WARPS)

    @cuda.jit(device=True)
    def run(arrays, affine, own_sums, shared, row, units, columns, B):
        gates, kept, c_before, c, dy, dh, dc, dgates, inverse_std = arrays
        (weight, shift), (of_bias, of_gain), (scratch, shown) = affine, own_sums, shared
        n = cuda.local.array((ITEMS, GATES), float32)
        slope = cuda.local.array((ITEMS, GATES), float32)
        before, after = cuda.local.array(ITEMS, float32), cuda.local.array(ITEMS, float32)
        of_h, of_c = cuda.local.array(ITEMS, float32), cuda.local.array(ITEMS, float32)
        share = cuda.local.array(ITEMS, float32)
        sums, others = cuda.local.array(SUMS, float32), cuda.local.array(SUMS, float32)
        t, threads = int64(cuda.threadIdx.x), int64(cuda.blockDim.x)
        rank = int64(cuda.blockIdx.x)
        first, many = rank * span_of(units, BLOCKS), units_of(units, rank, BLOCKS)
        of_row, of_states = row * columns, row * units
        for i in range(ITEMS):
            unit = first + min(t + i * threads, many - 1)
            at = of_states + unit
            before[i], after[i], of_c[i] = c_before[at], c[at], dc[at]
            of_h[i] = widened(dy[at]) + widened(dh[at])
            share[i] = widened(kept[at]) if dropped else ONE
            for k in range(GATES):
                n[i, k] = widened(gates[of_row + place(unit, B) + k * B])
        for k in range(SUMS):
            sums[k] = NONE
        for i in range(ITEMS):
            own = t + i * threads
            if own < many:
                own_gates = activated(
                    n[i, 0] * weight[i, 0] + shift[i, 0],
                    n[i, 1] * weight[i, 1] + shift[i, 1],
                    n[i, 2] * weight[i, 2] + shift[i, 2],
                    n[i, 3] * weight[i, 3] + shift[i, 3],
                )
                d = cell_grad(*own_gates, share[i], before[i], tanh(after[i]), of_h[i], of_c[i])
                dc[of_states + first + own] = d[GATES]
                for k in range(GATES):
                    of_bias[i, k] += d[k]
                    of_gain[i, k] += d[k] * n[i, k]
                    slope[i, k] = d[k] * weight[i, k]
                    sums[k] += slope[i, k]
                    sums[GATES + k] += slope[i, k] * n[i, k]
        add(sums, scratch)
        if BLOCKS > 1:
            show(sums, shown)
            for k in range(SUMS):
                sums[k] = NONE
            for other in range(BLOCKS):
                of_block(shown, other, others)
                for k in range(SUMS):
                    sums[k] += others[k]
        for i in range(ITEMS):
            own = t + i * threads
            if own < many:
                at = of_row + place(first + own, B)
                for k in range(GATES):
                    mean, dot = sums[k] / float32(units), sums[GATES + k] / float32(units)
                    of_z = inverse_std[row * GATES + k] * (slope[i, k] - mean - n[i, k] * dot)
                    dgates[at + k * B] = rounded(of_z, dgates)
        if rank == 0:
            for unit in range(units + t, columns // GATES, threads):
                for k in range(GATES):
                    at = of_row + place(unit, B) + k * B
                    dgates[at] = rounded(NONE, dgates)
        if BLOCKS > 1:
            cluster_sync()  # what a block shows is there until all have read it

    return run
