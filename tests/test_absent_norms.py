"""Norms of the gradients of blocks that are not there."""

import numpy as np
import pytest
from drawn import Space

import numbsparse as ns
from numbsparse import device, nn
from numbsparse.nn.utils import absent_norms

pytestmark = pytest.mark.usefixtures("cheap_products")


NORMS = Space(
    {
        "place": ["cpu", "cuda"],
        "by": ["l1", "l2", "max"],
        "piece": [1, 6, 9, 1000],
        "layout": ["random", "empty", "full"],
        "edge": [(0, 0), (1, 3)],
        "block_size": [4, 8],
    },
    lambda case: True,
).covering()


@pytest.mark.parametrize("case", NORMS, ids=lambda case: "-".join(map(str, case.values())))
def test_gradients_of_absent_blocks(case, rng):
    if case["place"] == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    grid, size = (5, 3), case["block_size"]
    pattern = {"random": rng.random(grid) < 0.5, "empty": np.zeros(grid, bool)}.get(
        case["layout"], np.ones(grid, bool)
    )
    shape = [n * size - cut for n, cut in zip(grid, case["edge"], strict=True)]
    x, dy = (rng.standard_normal((7, n)).astype(np.float32) for n in shape)
    whole = np.zeros((grid[0] * size, grid[1] * size))
    whole[: shape[0], : shape[1]] = abs(x.astype(np.float64).T @ dy)
    blocks = whole.reshape(grid[0], size, grid[1], size)
    right = {
        "l1": blocks.sum((1, 3)),
        "l2": np.sqrt((blocks**2).sum((1, 3))),
        "max": blocks.max((1, 3)),
    }[case["by"]]
    given = [ns.to_device(a) if case["place"] == "cuda" else a for a in (x, dy)]
    how = {"block_size": size, "by": case["by"], "piece": case["piece"]}
    got = absent_norms(*given, pattern, **how)
    np.testing.assert_allclose(got, np.where(pattern, 0, right), rtol=1e-4)


def test_no_piece_is_larger_than_asked(rng, monkeypatch):
    seen = []
    sddmm = nn.utils.absent.ops.sddmm

    def noted(a, b, part, **how):
        seen.append(part)
        return sddmm(a, b, part, **how)

    monkeypatch.setattr(nn.utils.absent.ops, "sddmm", noted)
    x, dy = rng.standard_normal((3, 40)), rng.standard_normal((3, 24))
    absent_norms(x, dy, np.eye(10, 6), block_size=4, piece=13)
    assert [part.shape for part in seen] == [(2, 6)] * 5
    with pytest.raises(ValueError, match=r"layout takes \(10, 6\) blocks .*, got \(6, 10\)"):
        absent_norms(x, dy, np.eye(6, 10), block_size=4)


def test_a_block_size_of_8_bits_reaches_as_far(rng):
    x, dy = rng.standard_normal((2, 3, 600), dtype=np.float32)
    own = np.eye(75, dtype=bool)
    found = absent_norms(x, dy, own, block_size=np.uint8(8), piece=75)
    np.testing.assert_array_equal(found, absent_norms(x, dy, own, block_size=8, piece=75))
