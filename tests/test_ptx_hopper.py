"""The copy engine, its barriers and wgmma against plain NumPy; in the simulator their meanings."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int64, uint8, uint16, uint32, uint64
from ptx_helpers import capability, run, simulated_only

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT, Operand
from numbsparse.kernels.ptx.tiles import swizzled

pytestmark = pytest.mark.skipif(
    not device.SIMULATED and capability() != (9, 0),
    reason="takes a GPU of compute capability 9.0, or the simulator",
)


def box_kernel(height, width):
    NBYTES = height * width

    @cuda.jit
    def kernel(x_map, column, row, out):
        """The bytes of a box as they lie in shared memory."""
        shared = cuda.shared.array(0, uint8)
        bars = cuda.shared.array(1, uint64)
        t = uint32(cuda.threadIdx.x)
        start = ptx.first_multiple(shared, 1024)
        if t == 0:
            ptx.mbarrier_init(bars, 0, 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        ptx.fence_tensor_map(x_map)
        if ptx.elect() != 0:
            ptx.mbarrier_expect(bars, 0, NBYTES)
            ptx.tma_load_2d(shared, start, x_map, column, row, bars, 0)
        ptx.mbarrier_wait(bars, 0, 0)
        for i in range(t, NBYTES, 32):
            out[i] = shared[start + i]

    return kernel


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("column", "row"), [(0, 0), (16, 5), (40, 30), (-8, -3), (0, 40)])
def test_tma_load_swizzles_and_fills_with_zeros(width, column, row, rng):
    wide = rng.standard_normal((37, 2, 56)).astype(np.float16)
    x, height = wide[:, 0], 24
    out = device.to_device(np.full(height * width, 0xFF, np.uint8))
    kept = device.to_device(wide)  # the map names its address
    x_map = tensor_map(kept[:, 0], (height, width // 2), width)
    kernel = box_kernel(height, width)
    launch(kernel, 1, 32, x_map, column, row, out, shared_bytes=height * width + 1024)

    padded = np.zeros((200, 200), np.float16)
    padded[50:87, 50:106] = x
    box = padded[50 + row :, 50 + column :][:height, : width // 2]
    expected = np.empty(height * width, np.uint8)
    expected[swizzled(np.arange(height * width), width)] = np.ravel(box).view(np.uint8)
    np.testing.assert_array_equal(out.numpy(), expected)


def storing_kernel(height, width):
    NBYTES = height * width

    @cuda.jit
    def kernel(given, x_map, column, row):
        """The bytes of a box from shared memory, twice."""
        shared = cuda.shared.array(0, uint8)
        t = uint32(cuda.threadIdx.x)
        start = ptx.first_multiple(shared, 1024)
        ptx.fence_tensor_map(x_map)
        for turn in range(2):
            ptx.bulk_wait_read()
            ptx.sync_warp()
            for i in range(t, NBYTES, 32):
                shared[start + i] = given[turn, i]
            ptx.fence_proxy_async()
            ptx.sync_warp()
            if ptx.elect() != 0:
                ptx.tma_store_2d(shared, start, x_map, column, row)
                ptx.bulk_commit()
        ptx.bulk_wait_read()

    return kernel


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("column", "row"), [(0, 0), (16, 5), (40, 30), (0, 40)])
def test_tma_store_writes_what_lies_inside(width, column, row, rng):
    height, before = 24, rng.standard_normal((37, 2, 56)).astype(np.float16)
    boxes = rng.standard_normal((2, height, width // 2)).astype(np.float16)
    given = np.empty((2, height * width), np.uint8)
    given[:, swizzled(np.arange(height * width), width)] = boxes.view(np.uint8).reshape(2, -1)
    kept = device.to_device(before)  # the map names its address
    x_map = tensor_map(kept[:, 0], (height, width // 2), width)
    kernel, shared_bytes = storing_kernel(height, width), height * width + 1024
    launch(kernel, 1, 32, device.to_device(given), x_map, column, row, shared_bytes=shared_bytes)

    padded = np.zeros((200, 200), np.float16)
    padded[50:87, 50:106] = before[:, 0]
    padded[50 + row :, 50 + column :][:height, : width // 2] = boxes[1]
    expected = before.copy()
    expected[:, 0] = padded[50:87, 50:106]
    np.testing.assert_array_equal(kept.numpy(), expected)


@cuda.jit
def stmatrix_kernel(registers, out):
    """Four matrices, then the transposed ones."""
    shared = cuda.shared.array((4, 8, 16), uint16, ALIGNMENT)
    t = cuda.threadIdx.x
    r0, r1, r2, r3 = registers[t, 0], registers[t, 1], registers[t, 2], registers[t, 3]
    for turn in range(2):
        if turn == 0:
            ptx.stmatrix_x4(shared, 16 * t, r0, r1, r2, r3)
        else:
            ptx.stmatrix_x4_trans(shared, 16 * t, r0, r1, r2, r3)
        ptx.sync_warp()
        for m in range(4):
            for i in range(t, 64, 32):
                out[turn, m, i // 8, i % 8] = shared[m, i // 8, i % 8]
        ptx.sync_warp()


def test_stmatrix_stores_fragments(rng):
    matrices = rng.integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    lanes = np.arange(32)  # each holds two neighbours of a row, of every matrix
    pairs = matrices.reshape(4, 8, 4, 2)[:, lanes // 4, lanes % 4]
    registers = np.ascontiguousarray(pairs).view(np.uint32)[:, :, 0].T
    got = run(stmatrix_kernel, registers, out=np.empty((2, 4, 8, 8), np.uint16))
    np.testing.assert_array_equal(got[0], matrices)
    np.testing.assert_array_equal(got[1], matrices.swapaxes(1, 2))


@cuda.jit
def layered_kernel(w_map, out):
    shared = cuda.shared.array(0, uint8)
    bars = cuda.shared.array(1, uint64)
    t = uint32(cuda.threadIdx.x)
    start = ptx.first_multiple(shared, 1024)
    if t == 0:
        ptx.mbarrier_init(bars, 0, 1)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    ptx.fence_tensor_map(w_map)
    if ptx.elect() != 0:
        ptx.mbarrier_expect(bars, 0, 1024)
        ptx.tma_load_3d(shared, start, w_map, 0, 0, 2, bars, 0)
    ptx.mbarrier_wait(bars, 0, 0)
    for i in range(t, 1024, 32):
        out[i] = shared[start + i]


@pytest.mark.parametrize("inside", [(9, 32), (16, 20)])
def test_tma_load_takes_a_part_of_a_layer(inside, rng):
    w = rng.integers(1, 2**16, (4, 16, 32), dtype=np.uint16)
    kept = device.to_device(w)
    out = device.to_device(np.full(1024, 0xFF, np.uint8))
    w_map = tensor_map(kept[:, : inside[0], : inside[1]], (1, 16, 32), 64)
    launch(layered_kernel, 1, 32, w_map, out, shared_bytes=2048)
    layer = w[2].copy()
    layer[inside[0] :] = layer[:, inside[1] :] = 0
    got = out.numpy()[swizzled(np.arange(1024), 64)]
    np.testing.assert_array_equal(got, np.ravel(layer).view(np.uint8))


ROUNDS = 5


@cuda.jit
def ring_kernel(x_map, out):
    """Two warps pass boxes through a ring of two stages."""
    shared = cuda.shared.array(0, float32)
    bars = cuda.shared.array(4, uint64)  # full, then empty
    t = uint32(cuda.threadIdx.x)
    start = ptx.first_multiple(shared, 1024)
    if t == 0:
        for stage in range(2):
            ptx.mbarrier_init(bars, stage, 1)
            ptx.mbarrier_init(bars, 2 + stage, 32)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        ptx.fence_tensor_map(x_map)
    for i in range(ROUNDS):
        stage, phase = i % 2, i // 2 % 2
        place = start + stage * 256
        if t < 32:
            ptx.mbarrier_wait(bars, 2 + stage, phase ^ 1)
            if ptx.elect() != 0:
                ptx.mbarrier_expect(bars, stage, 1024)
                ptx.tma_load_2d(shared, place, x_map, 0, 8 * i, bars, stage)
        else:
            ptx.mbarrier_wait(bars, stage, phase)
            total = float32(0)
            for j in range(t - 32, 256, 32):
                total += shared[place + j]
            out[i, t - 32] = total
            ptx.mbarrier_arrive(bars, 2 + stage)


def test_barriers_hand_stages_over(rng):
    x = rng.integers(0, 100, (8 * ROUNDS, 32)).astype(np.float32)
    kept = device.to_device(x)
    out = device.to_device(np.full((ROUNDS, 32), np.nan, np.float32))
    launch(ring_kernel, 1, 64, tensor_map(kept, (8, 32), 128), out, shared_bytes=4096)
    sums = x.reshape(ROUNDS, 256).sum(1)
    np.testing.assert_array_equal(out.numpy().sum(1), sums)


def product_kernel(kind, m_tiles, n, k_steps, a, b, columns, inputs, a_bytes):
    multiply = ptx.wgmma(kind, m_tiles, n, k_steps, a, b, columns, inputs, a_bytes)
    COUNT = max(columns, 1) * m_tiles * n // 2
    B_START, start_from = inputs * a_bytes, ptx.zeros(COUNT)

    @cuda.jit
    def kernel(tiles, mask, out):
        """Tiles of a, then of b, as they lie in shared memory; twice the product."""
        shared = cuda.shared.array(0, uint8)
        local = cuda.local.array(COUNT, float32)
        start = ptx.first_multiple(shared, 1024)
        t = cuda.threadIdx.x
        for i in range(t, tiles.shape[0], 128):
            shared[start + i] = tiles[i]
        ptx.fence_proxy_async()
        cuda.syncthreads()
        acc = start_from()
        for _ in range(2):
            acc = multiply_once(acc, shared, start, start + B_START, mask)
        ptx.to_local(acc, local)
        for i in range(COUNT):
            out[t, i] = local[i]

    if columns:

        @cuda.jit(device=True)
        def multiply_once(acc, shared, i, j, mask):
            return multiply(acc, shared, i, shared, j, uint32(mask))
    else:

        @cuda.jit(device=True)
        def multiply_once(acc, shared, i, j, mask):
            return multiply(acc, shared, i, shared, j)

    return kernel


def laid(values, operand, panels_bytes):
    """The bits of a factor (rows, terms) as `operand` says, swaps included."""
    row, k = np.indices(values.shape)
    item = values.itemsize
    byte = swizzled(operand.place(row, k, item), operand.width)
    out = np.zeros(panels_bytes // item, f"u{item}")
    out[byte // item] = values.view(out.dtype)
    return out.view(np.uint8)


def bits_of(values, kind):
    if kind == "tf32":
        return values.astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("m_tiles", "n", "depth", "a_width", "a_turned", "b_width", "b_turned", "columns"),
    [
        (1, 32, 32, 64, False, 64, False, 0),
        (2, 32, 32, 64, False, 64, True, 0),
        (1, 16, 16, 32, False, 32, True, 0),
        (1, 16, 16, 32, True, 32, False, 0),
        (2, 64, 64, 128, True, 128, True, 0),
        (1, 128, 128, 128, False, 128, True, 0),
        (1, 128, 128, 128, False, 128, False, 0),
        (2, 32, 64, 64, True, 64, True, 0),
        (1, 32, 32, 64, False, 64, True, 4),
        (2, 16, 32, 64, False, 32, True, 3),
        (1, 128, 128, 128, True, 128, False, 1),
    ],
)
def test_wgmma(kind, m_tiles, n, depth, a_width, a_turned, b_width, b_turned, columns, rng):
    rows = 64 * m_tiles
    # Panels hold `width` bytes of every line.
    a = Operand(a_width, (depth if a_turned else rows) * a_width, a_turned)
    b = Operand(b_width, (depth if b_turned else n) * b_width, b_turned)
    small = rng.integers(-8, 8, (rows, depth)), rng.integers(-8, 8, (max(columns, 1), n, depth))
    x, ws = (s.astype(np.float64) for s in small)
    tiles = [laid(bits_of(x, kind), a, rows * depth * 2)]
    tiles += [laid(bits_of(w, kind), b, n * depth * 2) for w in ws]
    kernel = product_kernel(kind, m_tiles, n, depth // 16, a, b, columns, 1, tiles[0].size)
    mask = 0b101 if columns > 2 else 1
    tiles = np.concatenate(tiles)
    count = max(columns, 1) * m_tiles * n // 2
    out = device.to_device(np.full((128, count), np.nan, np.float32))
    launch(kernel, 1, 128, device.to_device(tiles), mask, out, shared_bytes=tiles.size + 1024)
    got = out.numpy().reshape(4, 32, max(columns, 1), m_tiles, n // 2)

    expected = np.zeros((max(columns, 1), rows, n))
    held = [g for g in range(max(columns, 1)) if mask >> g & 1]
    for g, w in zip(held, ws, strict=False):  # gapless, those that the mask names
        expected[g] = 2 * x @ w.T
    warp, lane, g, m, i = np.indices(got.shape)
    row = 64 * m + 16 * warp + lane // 4 + i // 2 % 2 * 8
    column = i // 4 * 8 + lane % 4 * 2 + i % 2
    np.testing.assert_array_equal(got, expected[g, row, column])


@pytest.mark.parametrize(("n", "depth"), [(32, 64), (128, 32)])
def test_wgmma_of_float32(n, depth, rng):
    a, b = Operand(128, 64 * 128), Operand(128, n * 128)
    x, w = (rng.integers(-8, 8, (rows, depth)).astype(np.float64) for rows in (64, n))
    tiles = [laid(bits_of(f, "tf32"), of, f.size * 4) for f, of in ((x, a), (w, b))]
    kernel = product_kernel("tf32", 1, n, depth // 8, a, b, 0, 1, tiles[0].size)
    tiles = np.concatenate(tiles)
    out = device.to_device(np.full((128, n // 2), np.nan, np.float32))
    launch(kernel, 1, 128, device.to_device(tiles), 1, out, shared_bytes=tiles.size + 1024)
    t, i = np.indices((128, n // 2))
    row, column = t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2
    np.testing.assert_array_equal(out.numpy(), (2 * x @ w.T)[row, column])


def test_wgmma_of_several_inputs(rng):
    """acc[g] += x[e] @ w.T for the bits e * columns + g of the mask, w one after another."""
    rows = depth = n = 64
    a, b = Operand(128, rows * 128), Operand(128, n * 128)
    xs = rng.integers(-8, 8, (2, rows, depth)).astype(np.float64)
    ws = rng.integers(-8, 8, (3, n, depth)).astype(np.float64)
    tiles = [laid(bits_of(x, "f16"), a, rows * depth * 2) for x in xs]
    tiles += [laid(bits_of(w, "f16"), b, n * depth * 2) for w in ws]
    kernel = product_kernel("f16", 1, n, depth // 16, a, b, 2, 2, tiles[0].size)
    tiles = np.concatenate(tiles)
    out = device.to_device(np.full((128, n), np.nan, np.float32))
    launch(kernel, 1, 128, device.to_device(tiles), 0b1110, out, shared_bytes=tiles.size + 1024)
    got = out.numpy().reshape(4, 32, 2, n // 2)
    expected = 2 * np.stack([xs[1] @ ws[1].T, xs[0] @ ws[0].T + xs[1] @ ws[2].T])
    warp, lane, g, i = np.indices(got.shape)
    row = 16 * warp + lane // 4 + i // 2 % 2 * 8
    column = i // 4 * 8 + lane % 4 * 2 + i % 2
    np.testing.assert_array_equal(got, expected[g, row, column])


@cuda.jit
def uninitialized_kernel(out):
    bars = cuda.shared.array(1, uint64)
    ptx.mbarrier_arrive(bars, 0)
    out[0] = int64(0)


@cuda.jit
def too_many_kernel(out):
    bars = cuda.shared.array(1, uint64)
    ptx.mbarrier_init(bars, 0, 1)
    ptx.mbarrier_expect(bars, 0, 16)
    ptx.mbarrier_arrive(bars, 0)
    out[0] = int64(0)


@simulated_only
@pytest.mark.parametrize(
    ("kernel", "message"),
    [(uninitialized_kernel, "was not initialized"), (too_many_kernel, "more than 1 arrivals")],
)
def test_misused_barriers_are_told(kernel, message):
    out = device.to_device(np.zeros(1, np.int64))
    with pytest.raises(RuntimeError, match=message):
        launch(kernel, 1, 1, out)


def registers_kernel(given, taken):
    @cuda.jit(**({} if device.SIMULATED else {"launch_bounds": (512, 1)}))
    def kernel(x, out):
        t = uint32(cuda.threadIdx.x)
        if t < 128:
            ptx.fewer_registers(given)
            out[t] = x[t] + 1
        else:
            ptx.more_registers(taken)
            out[t] = x[t] * 2

    return kernel


def test_registers_handed_over_change_no_value(rng):
    x = rng.standard_normal(512).astype(np.float32)
    out = device.to_device(np.full(512, np.nan, np.float32))
    launch(registers_kernel(32, 160), 1, 512, device.to_device(x), out)
    np.testing.assert_array_equal(out.numpy(), np.r_[x[:128] + 1, x[128:] * 2])


@simulated_only
@pytest.mark.parametrize("count", [16, 100, 264])
def test_registers_are_multiples_of_8(count):
    x = device.to_device(np.zeros(512, np.float32))
    with pytest.raises(ValueError, match=f"24 to 256, a multiple of 8, got {count}"):
        launch(registers_kernel(count, 160), 1, 512, x, x)
