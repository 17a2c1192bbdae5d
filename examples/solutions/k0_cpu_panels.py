"""k0_cpu: x in panels, so that the innermost loop reads one run of memory.

A panel holds C rows of the batch, feature by feature. One step of the sum is then C neighbours of x
times R weights, which the real rung has in vector registers: R * C multiply-adds for R + C reads.
"""

import numpy as np

import numbsparse as ns

R, C, B = 4, 8, 16
rng = np.random.default_rng(0)
layout = ns.Layout(ns.patterns.random(4, 3, 0.5, seed=0))
w = ns.BlockSparse(rng.standard_normal((layout.n_blocks, B, B)), layout)
x = rng.standard_normal((3 * C, 4 * B))


def pack(x):
    """(panels, features, C): the batch runs along the last axis."""
    return np.ascontiguousarray(x.reshape(-1, C, x.shape[1]).transpose(0, 2, 1))


def forward(x, w):
    indptr, indices, blocks = w.layout.index.columns
    y, reads = np.full((x.shape[0], w.shape[1]), np.nan), 0
    for p, panel in enumerate(pack(x)):
        for column in range(len(indptr) - 1):
            for first in range(0, B, R):  # a tile of R outputs by C rows of the batch
                tile = np.zeros((R, C))
                for k in range(indptr[column], indptr[column + 1]):
                    for i in range(B):
                        weights = w.data[blocks[k], i, first : first + R]
                        run = panel[indices[k] * B + i]  # C neighbours in memory
                        tile += weights[:, None] * run
                        reads += R + C
                k = column * B + first
                y[p * C : (p + 1) * C, k : k + R] = tile.T
    return y, reads


y, reads = forward(x, w)
np.testing.assert_allclose(y, x @ w)
products = x.shape[0] * layout.n_blocks * B * B
print(f"{reads / products:.3f} reads per product; 1/R + 1/C is {1 / R + 1 / C:.3f}")
assert reads == products * (1 / R + 1 / C)
