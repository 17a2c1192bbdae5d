"""Two GPUs' mailboxes, both in this process: what one sends is what the other receives."""

import numpy as np
import pytest
from conftest import HALVES

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import exchange

pytestmark = pytest.mark.skipif(not device.SIMULATED, reason="on GPUs they are two processes'")
WORDS = 24  # of a slot


def both_ends():
    boxes = [ns.to_device(np.zeros((2, WORDS), np.uint32)) for _ in range(2)]
    flags, counts = ([ns.to_device(np.zeros(1, np.int32)) for _ in range(2)] for _ in range(2))
    return [
        exchange.Ends(boxes[i], boxes[1 - i], flags[i], flags[1 - i], counts[i]) for i in range(2)
    ]


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_parts_are_gathered_and_terms_summed(dtype, rng):
    """Several exchanges one after another, of several sizes, in each the slots in turn."""
    ends, dtype = both_ends(), as_dtype(dtype)
    for rows, width in ((3, 8), (1, 4), (2, 6), (3, 8)):
        parts = [rng.integers(-9, 9, (rows, width)).astype(dtype) for _ in range(2)]
        terms = [rng.integers(-9, 9, (rows, 2 * width)).astype(dtype) for _ in range(2)]
        there = [ns.to_device(a) for a in parts]
        for rank in range(2):
            exchange.send(there[rank], 0, 1, ends[rank])
        for rank in range(2):
            whole = ns.to_device(np.full((rows, 2 * width), np.nan, dtype))
            exchange.receive_whole(there[rank], rank, whole, ends[rank])
            np.testing.assert_array_equal(whole.numpy(), np.concatenate(parts, 1))
        there = [ns.to_device(a) for a in terms]
        for rank in range(2):
            exchange.send(there[rank], 1 - rank, 2, ends[rank])
        for rank in range(2):
            part = ns.to_device(np.full((rows, width), np.nan, dtype))
            exchange.receive_sum(there[rank], rank, part, ends[rank])
            mine = slice(rank * width, (rank + 1) * width)
            np.testing.assert_array_equal(part.numpy(), (terms[0] + terms[1])[:, mine])
    assert [end.exchanges.numpy()[0] for end in ends] == [8, 8]
