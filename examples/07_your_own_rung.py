"""Lesson 7: a rung of your own, tested and timed as the package's are.

You will learn what a rung is: a module with `unsupported`, which says in words what the rest does
not compute, and a function for each product that it does. This one is between k1_naive and
k3_registers: a thread computes ROWS outputs of one column, and reads each weight once for all of
them. Reads per output, for a sum of K products: K + K / ROWS, where k1_naive has 2 K.

Look at `check_rung`: it compares with the reference on awkward shapes, with outputs filled with
NaN first. What passes can be trusted, and only then is its cost of interest. The simulator
counts it; a GPU is timed, as a row of the benchmark's own table. The whole table, on a GPU:

    python -m numbsparse bench --only ladder --rung examples/07_your_own_rung.py

Exercise: write `input_grad`: it walks index.rows, and transposes each block. Then let a thread take
two neighbouring columns as well. What does the count say, and what a GPU?
"""

import sys

import gpu_or_simulator  # noqa: F401
from numba import cuda, float32

import numbsparse as ns
from numbsparse.bench.measure import Case
from numbsparse.bench.problem import Problem
from numbsparse.bench.results import line
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul import add_rung
from numbsparse.kernels.matmul.reach import reach

ROWS, THREADS = 4, 128

takes = reach("four_rows", "cuda", block_sizes=(8, 16, 32, 64, 128), dtypes=("float32",))


def unsupported(product, *case):
    return takes(product, *case) if product == "forward" else "four_rows computes only forward"


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    threads = -(-y.shape[0] // ROWS) * y.shape[1]
    launch(forward_kernel, -(-threads // THREADS), THREADS, x, values, *index.columns, y)


@cuda.jit
def forward_kernel(x, values, indptr, indices, blocks, y):
    batch, out_features = y.shape
    thread = cuda.grid(1)
    k, first = thread % out_features, thread // out_features * ROWS
    if first >= batch:
        return
    size = values.shape[1]
    column, j = k // size, k % size
    acc = cuda.local.array(ROWS, float32)  # in registers
    for r in range(ROWS):
        acc[r] = 0
    for position in range(indptr[column], indptr[column + 1]):
        block, start = blocks[position], indices[position] * size
        for i in range(min(size, x.shape[1] - start)):
            weight = values[block, i, j]
            for r in range(ROWS):
                acc[r] += x[min(first + r, batch - 1), start + i] * weight
    for r in range(ROWS):
        if first + r < batch:
            y[first + r, k] = acc[r]


def cost(kernel, problem):
    """Reads per output where they are counted, seconds where there is a GPU."""
    if ns.device.SIMULATED:
        x, y = problem.x.device, problem.out("forward")
        w = ns.BlockSparse(problem.values.device, problem.layout)
        (count,) = ns.testing.count(lambda: ns.matmul(x, w, out=y, kernel=kernel))
        print(f"\n{kernel}: {count.global_reads.accesses / y.size:g} reads per output\n{count}")
        return count.global_reads.accesses / y.size
    row = Case(problem, "forward", kernel).measured()
    print(line(row, [row]))
    return row["seconds"][kernel]


if __name__ == "__main__":
    for batch, in_features, out_features, size in [(1, 8, 8, 8), (7, 41, 30, 16), (6, 9, 23, 8)]:
        case = ns.testing.Case(batch, in_features, out_features, size)
        ns.testing.check_rung(sys.modules[__name__], "forward", case, "float32", "cuda")
        print(f"right: {case}")

    add_rung("four_rows", sys.modules[__name__])
    blocks, size, batch = (3, 8, 16) if ns.device.SIMULATED else (64, 32, 512)
    layout = ns.Layout(ns.patterns.random(blocks, blocks, density=0.4, seed=0))
    problem = Problem(layout, size, batch, "float32")
    costs = {kernel: cost(kernel, problem) for kernel in ("k1_naive", "four_rows", "k3_registers")}
    assert costs["four_rows"] < costs["k1_naive"], f"it should read less than k1_naive: {costs}"
