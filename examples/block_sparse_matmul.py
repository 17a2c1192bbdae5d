"""The launch post's example: hidden size 4096, blocks of 32 of which half are kept, batch 64."""

import numpy as np

import numbsparse as ns

rng = np.random.default_rng(0)
layout = ns.Layout(rng.integers(2, size=(4096 // 32, 4096 // 32)))
w = ns.BlockSparse(rng.standard_normal((layout.n_blocks, 32, 32), dtype=np.float32), layout)
x = rng.standard_normal((64, 4096), dtype=np.float32)

y = x @ w

error = abs(y - x.astype(np.float64) @ w.astype(np.float64).to_scipy()).max() / abs(y).max()
print(f"{w}\ny {y.shape}, largest error against SciPy in float64 {error:.1e} of the largest value")
assert error < 1e-5
