"""k1_naive: the same reads, with addresses worked out in 32 bits and from the start of each row.

Numba works out x[n, c] in 64 bits, axis by axis, and lets negative indices count from the end. Here
the arrays are flat, the indices unsigned and of 32 bits, and what does not change in the loop is
worked out before it. Run it on a GPU, too: it then takes the time of both. On an H200 (driver for
CUDA 13.0; 8192 x 8192, B = 32, batch 8192, density 0.1) 108 ms become 44.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import gpu_or_simulator  # noqa: F401
import numpy as np
from numba import cuda, float32, uint32

import numbsparse as ns
from numbsparse.bench.timing import graph_of, record, seconds_of
from numbsparse.device.launch import launch

SIMULATED = ns.device.SIMULATED
FEATURES, BATCH, B = (64, 4, 32) if SIMULATED else (8192, 8192, 32)


@cuda.jit
def forward_kernel(x, values, indptr, indices, blocks, y, batch, features, size):
    down = uint32(batch) // uint32(4)  # blocks of threads along the batch; nothing is left over
    n = uint32(uint32(cuda.blockIdx.x) % down * uint32(4) + uint32(cuda.threadIdx.y))
    k = uint32(uint32(cuda.blockIdx.x) // down * uint32(32) + uint32(cuda.threadIdx.x))
    B, row = uint32(size), uint32(n * uint32(features))
    column, j = uint32(k // B), uint32(k % B)
    acc = float32(0)
    for position in range(indptr[column], indptr[column + 1]):
        x_at = uint32(row + uint32(uint32(indices[position]) * B))
        w_at = uint32(uint32(uint32(blocks[position]) * uint32(B * B)) + j)
        for i in range(B):
            acc += x[uint32(x_at + uint32(i))] * values[uint32(w_at + uint32(uint32(i) * B))]
    y[uint32(row + k)] = acc  # as many outputs as inputs


rng = np.random.default_rng(0)
blocks = FEATURES // B
layout = ns.Layout(ns.patterns.random(blocks, blocks, 0.5 if SIMULATED else 0.1, seed=0))
values = rng.standard_normal((layout.n_blocks, B, B), dtype=np.float32)
w = ns.BlockSparse(values, layout).to("cuda")
x = ns.to_device(rng.standard_normal((BATCH, FEATURES), dtype=np.float32))
y, plain = (ns.to_device(np.full((BATCH, FEATURES), np.nan, np.float32)) for _ in range(2))
flat = [x.reshape(-1), w.data.reshape(-1), *ns.ops.index_beside(layout, x).columns, y.reshape(-1)]
grid = BATCH // 4 * (FEATURES // 32)


def short():
    launch(forward_kernel, grid, (32, 4), *flat, BATCH, FEATURES, B)


def naive():
    ns.matmul(x, w, kernel="k1_naive", out=plain)


if SIMULATED:
    counts = [ns.testing.count(call)[-1].global_reads for call in (short, naive)]
    print(*counts, sep="\n")
    assert counts[0].units == counts[1].units  # not one sector less
else:
    for call in (short, naive):
        call()
    graphs = {call.__name__: graph_of(record, call) for call in (short, naive)}
    seconds = seconds_of(graphs)
    print(", ".join(f"{name} {1e3 * time:.1f} ms" for name, time in seconds.items()))
    assert seconds["short"] < seconds["naive"]
np.testing.assert_allclose(y.numpy(), plain.numpy(), rtol=1e-4, atol=1e-4)
