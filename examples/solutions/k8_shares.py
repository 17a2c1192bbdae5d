"""k8_small_batch: whole lines for each multiprocessor, or equal shares that may cut a line.

In a scale-free layout a few block columns keep most blocks. Dealt out as whole lines, longest
first, one multiprocessor has far more to do than the others, and all wait for it. Cut into shares
of equal length, a line may be summed in parts, which are then added in their order: no atomics, and
the same bits in every run.
"""

from itertools import pairwise

import numpy as np

import numbsparse as ns

SHARES = 132
layout = ns.Layout(ns.patterns.barabasi_albert(384, 8, seed=0))
indptr = layout.index.columns.indptr
lengths = np.diff(indptr)


def by_lines():
    """Work of each share: every line goes to the one that has least."""
    work = np.zeros(SHARES, int)
    for length in np.sort(lengths)[::-1]:
        work[work.argmin()] += length
    return work


cuts = np.arange(SHARES + 1) * layout.n_blocks // SHARES
equal = np.diff(cuts)
uneven = by_lines().max() / by_lines().mean()
print(f"the busiest share has {uneven:.2f} times the mean by lines, ", end="")
print(f"{equal.max() / equal.mean():.2f} times by equal shares")
assert uneven > 1.5
assert equal.max() - equal.min() <= 1

# The sums of the parts: a share's blocks, line by line; then the parts of a line in their order.
terms = np.random.default_rng(0).standard_normal(layout.n_blocks)
sums = np.zeros(lengths.size)
parts = 0
line_of_block = np.repeat(np.arange(lengths.size), lengths)
for begin, end in pairwise(cuts):
    for line in np.unique(line_of_block[begin:end]):
        sums[line] += terms[begin:end][line_of_block[begin:end] == line].sum()
        parts += 1
expected = np.array([terms[a:b].sum() for a, b in pairwise(indptr)])
np.testing.assert_allclose(sums, expected, atol=1e-12)
print(f"{lengths.size} lines in {parts} parts")
assert parts < lengths.size + SHARES  # a share begins at most one part more
