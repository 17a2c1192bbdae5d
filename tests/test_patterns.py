"""Patterns: exact counts, determinism, and what each maker promises."""

import math

import numpy as np
import pytest

from numbsparse import patterns

SEEDS = range(20)


def maker(name, *args, kept, shape):
    ident = f"{name}({', '.join(map(str, args))})"
    return pytest.param(getattr(patterns, name), args, kept, shape, id=ident)


SEEDLESS = [
    maker("dense", 3, 5, kept=15, shape=(3, 5)),
    maker("block_diagonal", 7, 7, 3, kept=3 * 3 + 2 * 2 + 2 * 2, shape=(7, 7)),
    maker("block_diagonal", 4, 9, 2, kept=2 * 5 + 2 * 4, shape=(4, 9)),
    maker("block_diagonal", 5, 5, 5, kept=5, shape=(5, 5)),
    maker("banded", 10, 10, 2, kept=10 * 5 - 2 * (2 + 1), shape=(10, 10)),
    maker("banded", 3, 7, 0, kept=7, shape=(3, 7)),
    maker("banded", 7, 3, 0, kept=7, shape=(7, 3)),
    maker("banded", 4, 6, 99, kept=24, shape=(4, 6)),
]
SEEDED = [
    maker("random", 7, 9, 0.3, kept=round(0.3 * 63), shape=(7, 9)),
    maker("random", 50, 20, 0, kept=0, shape=(50, 20)),
    maker("random", 5, 20, 1, kept=100, shape=(5, 20)),
    maker("watts_strogatz", 41, 3, 0.0, kept=41 * 7, shape=(41, 41)),
    maker("watts_strogatz", 40, 3, 0.3, kept=40 * 7, shape=(40, 40)),
    maker("watts_strogatz", 40, 19, 1.0, kept=40 * 39, shape=(40, 40)),
    maker("watts_strogatz", 3, 1, 0.5, kept=9, shape=(3, 3)),
    maker("watts_strogatz_2d", 6, 8, 4, 0.2, kept=48 * 9, shape=(48, 48)),
    maker("watts_strogatz_2d", 2, 9, 5, 1.0, kept=18 * 11, shape=(18, 18)),
    maker("barabasi_albert", 2, 1, kept=4, shape=(2, 2)),
    maker("barabasi_albert", 60, 4, kept=2 * 4 * 56 + 16 + 56, shape=(60, 60)),
    maker("barabasi_albert", 20, 19, kept=400, shape=(20, 20)),
    maker("barabasi_albert_rectangular", 30, 70, 3, kept=3 * 97, shape=(30, 70)),
    maker("barabasi_albert_rectangular", 70, 30, 30, kept=2100, shape=(70, 30)),
    maker("barabasi_albert_rectangular", 1, 1, 1, kept=1, shape=(1, 1)),
    maker("balanced_random", 12, 18, 4, kept=72, shape=(12, 18)),
    maker("balanced_random", 10, 7, 3, kept=21, shape=(10, 7)),
    maker("balanced_random", 5, 1, 5, kept=5, shape=(5, 1)),
]


def check(pattern, kept, shape):
    assert pattern.dtype == bool
    assert pattern.shape == shape
    assert pattern.sum() == kept


@pytest.mark.parametrize(("make", "args", "kept", "shape"), SEEDLESS)
def test_counts_without_seed(make, args, kept, shape):
    check(make(*args), kept, shape)


@pytest.mark.parametrize(("make", "args", "kept", "shape"), SEEDED)
def test_counts_and_determinism(make, args, kept, shape):
    for seed in SEEDS:
        check(make(*args, seed=seed), kept, shape)
    again = make(*args, seed=np.int64(3))
    assert np.array_equal(again, make(*args, seed=3))
    assert np.array_equal(again, make(*args, seed=np.random.default_rng(3)))
    leaves_choice = 0 < kept < again.size and args[-1] != 0.0
    if leaves_choice:
        assert not np.array_equal(again, make(*args, seed=4))
        generator = np.random.default_rng(3)
        assert not np.array_equal(make(*args, seed=generator), make(*args, seed=generator))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: patterns.watts_strogatz(50, 4, 0.4, seed=seed),
        lambda seed: patterns.watts_strogatz_2d(5, 9, 4, 0.4, seed=seed),
        lambda seed: patterns.barabasi_albert(50, 4, seed=seed),
    ],
    ids=["watts_strogatz", "watts_strogatz_2d", "barabasi_albert"],
)
def test_graphs_are_symmetric_with_a_full_diagonal(make):
    for seed in SEEDS:
        pattern = make(seed)
        assert np.array_equal(pattern, pattern.T)
        assert pattern.diagonal().all()


def test_random_draws_every_block_equally_often():
    drawn = sum(patterns.random(4, 5, 0.25, seed=seed).astype(int) for seed in range(2000))
    # Each block is kept with probability 1/4: 500 of 2000 times, standard deviation 19.4.
    assert np.abs(drawn - 500).max() < 5 * math.sqrt(2000 * 0.25 * 0.75)


def test_block_diagonal_by_hand():
    groups = np.array([0, 0, 0, 1, 1])
    expected = np.equal.outer([0, 0, 1], groups)
    assert np.array_equal(patterns.block_diagonal(3, 5, 2), expected)


@pytest.mark.parametrize("width", [0, 1, 3])
def test_banded_square_and_transposed(width):
    i, j = np.indices((9, 9))
    assert np.array_equal(patterns.banded(9, 9, width), abs(i - j) <= width)
    wide = patterns.banded(5, 12, width)
    assert np.array_equal(wide, patterns.banded(12, 5, width).T)
    assert wide[0, 0]
    assert wide[-1, -1]


def test_watts_strogatz_2d_neighbours_by_hand():
    grid = patterns.watts_strogatz_2d(5, 7, 4, 0.0, seed=0)
    around = grid[2 * 7 + 3].reshape(5, 7)
    expected = np.zeros((5, 7), dtype=bool)
    expected[1:4, 2:5] = True
    assert np.array_equal(around, expected)
    corner = grid[0].reshape(5, 7)
    assert np.array_equal(corner, np.roll(expected, (-2, -3), axis=(0, 1)))


def test_watts_strogatz_2d_of_one_row_is_the_ring():
    row = patterns.watts_strogatz_2d(1, 30, 3, 0.3, seed=5)
    assert np.array_equal(row, patterns.watts_strogatz(30, 3, 0.3, seed=5))


@pytest.mark.parametrize(
    ("in_blocks", "out_blocks", "fan_in"),
    [(12, 12, 5), (8, 20, 2), (7, 5, 3), (10, 1, 4), (9, 9, 9)],
)
def test_balanced_random_is_balanced(in_blocks, out_blocks, fan_in):
    for seed in SEEDS:
        pattern = patterns.balanced_random(in_blocks, out_blocks, fan_in, seed=seed)
        assert set(pattern.sum(axis=0)) == {fan_in}
        fan_out = pattern.sum(axis=1)
        assert fan_out.max() - fan_out.min() == (1 if fan_in * out_blocks % in_blocks else 0)


@pytest.mark.slow
def test_balanced_random_gives_what_is_over_to_any_row():
    # 3 * 5 blocks in 10 rows: 5 rows, drawn anew each time, keep two; standard deviation 14.1.
    fuller = sum(
        patterns.balanced_random(10, 5, 3, seed=seed).sum(axis=1) - 1 for seed in range(800)
    )
    assert np.abs(fuller - 400).max() < 5 * math.sqrt(800 / 4)


@pytest.mark.slow
def test_balanced_random_draws_every_pattern_equally_often():
    """Of the 90 patterns of 4 x 4 with two blocks in each row and column."""
    count: dict[bytes, int] = {}
    for seed in range(900):
        key = patterns.balanced_random(4, 4, 2, seed=seed).tobytes()
        count[key] = count.get(key, 0) + 1
    assert len(count) == 90
    # Chi-squared with 89 degrees of freedom: mean 89, standard deviation 13.3.
    assert sum((c - 10) ** 2 / 10 for c in count.values()) < 89 + 5 * math.sqrt(2 * 89)


def block_norms(weights, size):
    rows = range(0, weights.shape[0], size)
    columns = range(0, weights.shape[1], size)
    return np.array(
        [[np.linalg.norm(weights[i : i + size, j : j + size]) for j in columns] for i in rows]
    )


@pytest.mark.parametrize("shape", [(12, 20), (13, 18), (3, 5)], ids=str)
@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, int], ids=lambda t: t.__name__
)
def test_from_dense_keeps_the_largest_blocks(shape, dtype):
    weights = (10 * np.random.default_rng(0).normal(size=shape)).astype(dtype)
    norms = block_norms(weights.astype(np.float64), 4)
    for density in (0, 0.3, 0.5, 1):
        pattern = patterns.from_dense(weights, 4, density=density)
        check(pattern, round(density * norms.size), norms.shape)
        assert norms[pattern].min(initial=np.inf) >= norms[~pattern].max(initial=0)
    threshold = np.median(norms) + 1e-6
    assert np.array_equal(patterns.from_dense(weights, 4, threshold=threshold), norms >= threshold)


def test_from_dense_ties_go_to_the_first_and_threshold_includes_equals():
    weights = np.ones((4, 4))
    assert np.array_equal(
        patterns.from_dense(weights, 2, density=0.5), [[True, True], [False, False]]
    )
    assert patterns.from_dense(weights, 2, threshold=2).all()
    assert not patterns.from_dense(weights, 2, threshold=2.001).any()


@pytest.mark.slow
def test_big_patterns_are_made_at_once():
    """Far beyond what a loop over all pairs of units could do in the time that tests have."""
    assert patterns.barabasi_albert(2000, 10, seed=0).sum() == 2 * 10 * 1990 + 100 + 1990
    assert patterns.watts_strogatz(2000, 10, 0.2, seed=0).sum() == 2000 * 21
    assert patterns.mean_path_length(patterns.watts_strogatz(2001, 1, 0.0, seed=0)) == 500.5
