"""Block columns that come in fours, as an LSTM's gates do."""

import numpy as np
import pytest

from numbsparse.kernels.lstm.deal import in_fours
from numbsparse.layout import Layout


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (np.repeat([[1, 0], [1, 1]], 4, axis=1), True),
        (np.zeros((2, 4), bool), True),
        (np.ones((2, 6), bool), False),
        ([[1, 1, 1, 0], [0, 0, 0, 1]], False),
        ([[1, 1, 1, 1], [0, 0, 0, 1]], False),
        (np.tile([[1, 0], [0, 1]], (1, 4)), False),
    ],
    ids=["fours", "nothing kept", "six columns", "other rows", "more rows", "gate by gate"],
)
def test_what_comes_in_fours(pattern, expected):
    assert in_fours(Layout(pattern).index) == (expected,)
