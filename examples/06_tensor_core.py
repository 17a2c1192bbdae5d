"""Lesson 6: stepping through a tensor-core instruction.

You will learn what the 32 lanes of a warp hold before and after `mma.sync.m16n8k16`, which
multiplies a (16 x 16) by b (16 x 8), float16, and adds in float32, in one go. No lane has a whole
row or column: each has 8 values of a, 4 of b and 4 of d; two float16 share a register. `ldmatrix`
distributes them: a lane names a row of 8 values in shared memory, and gets its part of all rows.

Look at lane 5: its rows of a are its rows of d, and neighbours of a row share its register. A value
of d needs a whole row of a and a whole column of b, which four lanes each hold a part of: what they
hold of it meets inside the instruction, and nowhere else.

Exercise: load b with `ldmatrix_x4` in place of `ldmatrix_x4_trans`, and see in the picture of b
what is in the registers now. Which product of a and b comes out?

On a GPU this takes compute capability 8.0.
"""

import gpu_or_simulator  # noqa: F401
import numpy as np
from numba import cuda, float32, types

import numbsparse as ns
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT


@cuda.jit
def step_kernel(a, b, a_held, b_held, d_held):
    xs = cuda.shared.array(16 * 16, types.float16, ALIGNMENT)  # a, row after row
    ws = cuda.shared.array(16 * 8, types.float16, ALIGNMENT)  # b
    lane = cuda.threadIdx.x
    for i in range(lane, 256, 32):
        xs[i] = a[i]
    for i in range(lane, 128, 32):
        ws[i] = b[i]
    ptx.sync_warp()
    # Four matrices of 8 x 8: the quarters of a, down first; lane 8 m + r names row r of matrix m.
    a0, a1, a2, a3 = ptx.ldmatrix_x4(xs, lane % 16 * 16 + lane // 16 * 8)
    # The halves of b, each transposed on the way, and both once more.
    b0, b1, _, _ = ptx.ldmatrix_x4_trans(ws, lane % 16 * 8)
    zero = float32(0)
    d0, d1, d2, d3 = ptx.mma_m16n8k16_f16(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
    a_held[lane, 0], a_held[lane, 1], a_held[lane, 2], a_held[lane, 3] = a0, a1, a2, a3
    b_held[lane, 0], b_held[lane, 1] = b0, b1
    d_held[lane, 0], d_held[lane, 1], d_held[lane, 2], d_held[lane, 3] = d0, d1, d2, d3


def step(a, b):
    """The registers of a, b and d of the 32 lanes, as the numbers in them."""
    held = [ns.to_device(np.zeros((32, n), np.uint32)) for n in (4, 2)]
    held.append(ns.to_device(np.full((32, 4), np.nan, np.float32)))
    launch(step_kernel, 1, 32, *(ns.to_device(m.ravel().astype(np.float16)) for m in (a, b)), *held)
    a_held, b_held, d_held = (array.numpy() for array in held)
    return a_held.view(np.float16), b_held.view(np.float16), d_held


def picture(held, width, name, values_in_a_register):
    """Lines that say at each place of a matrix which lane holds it, and in which register."""
    lines = np.empty((16, width), object)
    for lane, value in np.ndindex(held.shape):
        row, column = divmod(int(held[lane, value]), 16)
        lines[row, column] = f"{lane:2}{name}{value // values_in_a_register}"
    return [" ".join(line) for line in lines]


# Each value says where it stands, 16 * row + column; this b takes the left half of a over to d.
places = 16 * np.arange(16)[:, None] + np.arange(16)
a_held, b_held, _ = step(places, places[:, :8])
d_held = step(places, np.eye(16, 8))[2]
print("a (16 x 16): the lane that holds each value, and its register")
print(*picture(a_held, 16, "a", 2), sep="\n")
print("\nb (16 x 8)                                d = a @ b (16 x 8)")
for b_line, d_line in zip(picture(b_held, 8, "b", 2), picture(d_held, 8, "d", 1), strict=True):
    print(b_line, " ", d_line)

# With other numbers, the values of d stand where the picture says.
rng = np.random.default_rng(0)
a, b = rng.integers(-8, 8, (16, 16)), rng.integers(-8, 8, (16, 8))
d = np.full((16, 8), np.nan, np.float32)
d[np.divmod(d_held.astype(int), 16)] = step(a, b)[2]
assert (d == a @ b).all(), (
    f"step_kernel: {(d != a @ b).sum()} of 128 values of d are not those of a @ b. Of column g of b"
    " lane 4 g + q has to hold rows 2 q and 2 q + 1 in b0, rows 2 q + 8 and 2 q + 9 in b1: look "
    "where it stands in the picture of b"
)
