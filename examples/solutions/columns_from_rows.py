"""Layouts: the walk down the block columns, made from the walk along the block rows.

A counting sort: count the blocks of each column, add the counts up to see where each column begins,
then deal the blocks out in the order in which they are stored. So within a column the rows rise.
"""

import numpy as np

import numbsparse as ns


def columns_from_rows(indptr, indices, n_columns):
    starts = np.zeros(n_columns + 1, int)
    for column in indices:
        starts[column + 1] += 1
    starts = np.cumsum(starts)
    free = starts[:-1].copy()  # where the next block of each column goes
    met, blocks = np.empty_like(indices), np.empty_like(indices)
    for row in range(len(indptr) - 1):
        for block in range(indptr[row], indptr[row + 1]):
            place = free[indices[block]]
            met[place], blocks[place] = row, block
            free[indices[block]] += 1
    return starts, met, blocks


layout = ns.Layout(ns.patterns.random(7, 5, 0.4, seed=1))
made = columns_from_rows(layout.indptr, layout.indices, layout.shape[1])
for own, array in zip(made, layout.index.columns, strict=True):
    np.testing.assert_array_equal(own, array)
print(ns.draw(layout))
print("columns: indptr {}\n         indices {}\n         blocks {}".format(*made))
