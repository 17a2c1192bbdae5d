"""k0_reference: which mistakes of a rung does the comparison with the reference see?

`check_rung` fills outputs with NaN, and allows what follows from the length of a sum in float32. So
it sees a product that is left out, an output that is not written, and a sum in float16.
"""

from types import ModuleType

import numpy as np

import numbsparse as ns
from numbsparse.kernels.matmul import k0_reference


def rung(name, forward):
    module = ModuleType(name)
    module.forward = forward
    return module


def right(x, values, index, y, precision="highest"):
    k0_reference.forward(x, values, index, y)


def leaves_a_product_out(x, values, index, y, precision="highest"):
    values = values.copy()
    values[-1, 0, 0] = 0
    k0_reference.forward(x, values, index, y)


def leaves_the_last_row(x, values, index, y, precision="highest"):
    k0_reference.forward(x[:-1], values, index, y[:-1])


def adds_up_in_float16(x, values, index, y, precision="highest"):
    size, sums = values.shape[1], np.zeros(y.shape, np.float16)
    for block, (row, column) in enumerate(zip(index.block_rows, index.block_columns, strict=True)):
        for i in range(size):  # one term of the sum at a time, each rounded as it is added
            sums[:, column * size :][:, :size] += x[:, row * size + i, None] * values[block, i]
    y[:] = sums


case = ns.testing.Case(batch=5, in_features=32, out_features=24, block_size=8)
for forward in (right, leaves_a_product_out, leaves_the_last_row, adds_up_in_float16):
    try:
        ns.testing.check_rung(rung(forward.__name__, forward), "forward", case, "float32", "cpu")
        seen = False
    except AssertionError as error:
        seen = True
        print(error)
    assert seen == (forward is not right), forward.__name__
