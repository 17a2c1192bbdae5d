"""Which of the CPU's kernels for few rows tests have: each takes a second to compile."""

import numpy as np

from numbsparse.kernels.matmul.k0_cpu import few_rows, lines

FEW_ROWS = {  # dtype, rows at once, and the sizes of blocks: each with and without transposing
    # Each number of rows, and blocks of less than a vector, one, several, and several tiles.
    ("float32", 1): (4, 32),
    ("float32", 2): (8,),
    ("float32", 4): (16, 128),
    ("float32", 8): (64,),
    ("float64", 4): (32,),
}


def has_kernel(batch: int, values: np.ndarray) -> bool:
    size = values.shape[1]
    rows = few_rows.rows_at_once(size, batch) if batch else 0
    return size in FEW_ROWS.get((values.dtype.name, rows), ())


def take_few_kernels() -> None:
    """In this process other few rows are packed as many are, to the same numbers bit by bit."""
    lines.pays = lambda batch, values, *how: (
        has_kernel(batch, values) and few_rows.pays(batch, values, *how)
    )
