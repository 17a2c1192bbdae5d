"""An edit of the kept blocks in one pass: some of them go, and others come between."""

import numpy as np

from numbsparse.kernels.cores import compiled


def merged(
    flat: np.ndarray, stay: np.ndarray, new: np.ndarray, grid: tuple[int, int]
) -> tuple[np.ndarray, ...]:
    """Of what is kept then: flat indices, where in `flat` they were or -1, indptr, rows, columns.

    `flat` rises, and so do the new ones, which are not in it.

    >>> merged(np.array([1, 4, 5]), np.array([True, False, True]), np.array([2]), (2, 3))[:2]
    (array([1, 2, 5]), array([ 0, -1,  2]))
    """
    n = np.count_nonzero(stay) + new.size
    (together, positions), (rows, columns) = np.empty((2, n), np.int64), np.empty((2, n), np.int32)
    indptr = np.zeros(grid[0] + 1, np.int32)
    _merge(flat, stay, new, grid[1], together, positions, indptr, rows, columns)
    return together, positions, indptr, rows, columns


@compiled(error_model="numpy")
def _merge(flat, stay, new, width, together, positions, indptr, rows, columns):
    i = k = row = 0
    for n in range(together.size):
        while i < flat.size and not stay[i]:
            i += 1
        if k < new.size and (i == flat.size or new[k] < flat[i]):
            together[n], positions[n], k = new[k], -1, k + 1
        else:
            together[n], positions[n], i = flat[i], i, i + 1
        while together[n] >= (row + 1) * width:
            row += 1
            indptr[row] = n
        rows[n], columns[n] = row, together[n] - row * width
    indptr[row + 1 :] = together.size
