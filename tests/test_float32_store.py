"""How sums of float32 leave a warp's registers: in whole pieces the same as one by one."""

import numpy as np
import pytest
from numba import cuda, float32, int64
from ptx_helpers import needs_ampere, run

from numbsparse.kernels.parts.store_tile import rows_from, store_tile

TA = 2


def storing_kernel(TB, wide, rows, columns):
    store, ACC = store_tile("highest", TA, TB, wide, rows_from("highest", TA)), (TA, TB, 4)

    @cuda.jit
    def kernel(sums, y):
        acc = cuda.local.array(ACC, float32)
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    acc[m, n, i] = sums[cuda.threadIdx.x, m, n, i]
        store(acc, y, (int64(8), rows), int64(4), columns)

    return kernel


@needs_ampere
@pytest.mark.parametrize("TB", [2, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(28, 16), (48, 76)], ids=["cut off", "whole"])
def test_pieces_are_stored_as_single_values_are(rows, columns, TB, rng):
    sums = rng.standard_normal((32, TA, TB, 4), np.float32)
    y = np.empty(rows * columns, np.float32)
    whole, single = (
        run(storing_kernel(TB, wide, rows, columns), sums, out=y) for wide in (True, False)
    )
    np.testing.assert_array_equal(whole, single)
    y = single.reshape(rows, columns)
    stored = y[8 : 8 + 16 * TA, 4 : 4 + 8 * TB]
    assert not np.isnan(stored).any()
    assert np.isfinite(single).sum() == stored.size
    assert np.isin(stored, sums).all()
