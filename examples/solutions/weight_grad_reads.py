"""The weight-gradient: values read per weight by k1 and k3, for a sum of K rows of the batch.

    k1_naive      2 K, none                  every thread reads for itself
    k3_registers  2 K / B, 2 K / 4           a block of threads for a kept block; 4 x 4 a thread

(global, then shared). What is counted beyond that are the index arrays.
"""

import os
from functools import partial

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # what is counted here is counted in the simulator

import numpy as np

import numbsparse as ns

CASES = {  # block size, kept blocks in a row, K
    "k1_naive": (16, 1, 16),
    "k3_registers": (32, 1, 32),
}


def formula(kernel, B, K):
    return {
        "k1_naive": (2 * K, 0),
        "k3_registers": (2 * K / B, 2 * K / 4),
    }[kernel]


def operands(B, blocks, K):
    rng = np.random.default_rng(0)
    layout = ns.Layout(np.ones((1, blocks), bool))
    x, dy = (rng.standard_normal((K, width), dtype=np.float32) for width in (B, blocks * B))
    return ns.to_device(x), ns.to_device(dy), layout


def compute(results, x, dy, layout, B, kernel):
    results.append(ns.sddmm(x.T, dy, layout, block_size=B, kernel=kernel))


for kernel, (B, blocks, K) in CASES.items():
    x, dy, layout = operands(B, blocks, K)
    results = []
    counted = ns.testing.count(partial(compute, results, x, dy, layout, B, kernel))[-1]
    expected = x.numpy().T @ dy.numpy()
    np.testing.assert_allclose(results[0].to("cpu").toarray(), expected, rtol=1e-4, atol=1e-4)
    counts = [a.nbytes / 4 / expected.size for a in (counted.global_reads, counted.shared_reads)]
    wanted = formula(kernel, B, K)
    print(
        f"{kernel:13} {counts[0]:6.2f} {counts[1]:6.2f} counted, {wanted[0]:6.2f} {wanted[1]:6.2f}"
    )
    assert counts[1] == wanted[1]
    assert wanted[0] <= counts[0] < 1.2 * wanted[0] + 1
