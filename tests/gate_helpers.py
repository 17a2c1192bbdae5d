"""What tests of gates share: a small layout, and what results must be."""

import numpy as np
from conftest import host

import numbsparse as ns

UNIT = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def pattern():
    return np.array([[1, 1, 0], [0, 0, 1]], bool)


def spread(gates, w):
    """Over all values of the matrix, as dense."""
    blocks = np.broadcast_to(gates[:, None, None], (w.n_blocks, *[w.block_size] * 2))
    return ns.BlockSparse(blocks.astype(np.float64), w.layout, shape=w.shape).toarray()


def close(got, right, size, dtype, terms):
    """Within what `terms` sums may round, `size` the same of absolute values."""
    got = host(got).astype(np.float64)
    assert got.shape == right.shape
    wide = min(UNIT[dtype], UNIT["float32"])
    bound = (4 * UNIT[dtype] + 2 * (terms + 16) * wide) * size
    least = 2.0**-20 if dtype == "float16" else 0
    assert (abs(got - right) <= bound + least * (size > 0)).all()
