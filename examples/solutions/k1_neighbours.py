"""k1_naive: what it costs when neighbouring threads take neighbouring rows instead of columns.

Each thread still sums one output, and reads what it read before. But 32 rows of x are far apart:
a warp touches 32 sectors for them, where 32 neighbouring weights were 4, and as many for y.
"""

import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # what is counted here is counted in the simulator

import numpy as np
from numba import cuda, float32

import numbsparse as ns
from numbsparse.device.launch import launch


@cuda.jit
def rows_first(x, values, indptr, indices, blocks, y):
    n = cuda.threadIdx.x  # neighbours along the batch, which is not contiguous
    k = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    if n >= y.shape[0] or k >= y.shape[1]:
        return
    size = values.shape[1]
    column, j = k // size, k % size
    acc = float32(0)
    for position in range(indptr[column], indptr[column + 1]):
        block, first = blocks[position], indices[position] * size
        for i in range(size):
            acc += x[n, first + i] * values[block, i, j]
    y[n, k] = acc


rng = np.random.default_rng(0)
w = ns.BlockSparse(rng.standard_normal((2, 16, 16), dtype=np.float32), [[1, 1]]).to("cuda")
x = ns.to_device(rng.standard_normal((32, 16), dtype=np.float32))
y = ns.to_device(np.full((32, 32), np.nan, np.float32))
walk = ns.ops.index_beside(w.layout, y).columns

(columns,) = ns.testing.count(lambda: ns.matmul(x, w, kernel="k1_naive"))
(rows,) = ns.testing.count(lambda: launch(rows_first, 8, (32, 4), x, w.data, *walk, y))
np.testing.assert_allclose(y.numpy(), x.numpy() @ w.to("cpu").toarray(), rtol=1e-4, atol=1e-4)
print("k1_naive:", columns, "rows first:", rows, sep="\n")

assert rows.global_reads.requests == columns.global_reads.requests
assert rows.global_reads.units > 6 * columns.global_reads.units
assert rows.global_writes.units == 8 * columns.global_writes.units
