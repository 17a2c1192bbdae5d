"""k3_registers: how the tile of a thread sets what is read from shared memory, and at what price.

K / TM + K / TN values per output: a thread of 8 x 8 reads half as much as one of 4 x 4. The price
is counted beside it: what a thread keeps in local arrays, which are registers (its sums, and of a
step the values that it multiplies), and how many threads are left for the work of the same tile,
and to go on while others wait.
"""

import os
from functools import partial

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # what is counted here is counted in the simulator

import numpy as np

import numbsparse as ns
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k3_registers import QUAD, Tile, fetch_straight, line_kernel

BATCH, B = 64, 16
rng = np.random.default_rng(0)
w = ns.BlockSparse(rng.standard_normal((1, B, B), dtype=np.float32), [[1]]).to("cuda")
x = ns.to_device(rng.standard_normal((BATCH, B), dtype=np.float32))
walk = ns.ops.index_beside(w.layout, x).columns
expected = ns.matmul(x, w, kernel="k1_naive").numpy()

for TM, TN in ((4, 4), (8, 4), (8, 8)):
    tile = Tile(BATCH, B, B, TM, TN)
    y = ns.to_device(np.full((BATCH, B), np.nan, np.float32))
    kernel = line_kernel(B, tile, fetch_straight)
    (counted,) = ns.testing.count(partial(launch, kernel, 1, tile.threads, x, w.data, *walk, y))
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4)
    read = counted.shared_reads.nbytes / 4 / y.size
    kept = counted.local_bytes // 4
    threads = counted.block[0]
    print(f"{TM} x {TN}: {read:g} reads per output; {threads} threads keep {kept} values each")
    assert read == B / TM + B / TN
    assert kept == TM * TN + TM + TN + QUAD  # QUAD on the way to shared memory
    assert threads == y.size // (TM * TN)
