"""What `as_pattern` takes, and that every bad argument is refused by name."""

import math

import numpy as np
import pytest

from numbsparse import patterns


@pytest.mark.parametrize(
    "given",
    [
        [[True, False], [False, True]],
        [[1, 0], [0, 1]],
        np.eye(2),
        np.eye(2, dtype=np.float16),
        np.eye(2, dtype=np.uint8),
        ((1, 0), (0, 1)),
    ],
    ids=["bool list", "int list", "float64", "float16", "uint8", "tuples"],
)
def test_as_pattern_takes(given):
    pattern = patterns.as_pattern(given)
    assert pattern.dtype == bool
    assert np.array_equal(pattern, np.eye(2, dtype=bool))


def test_as_pattern_does_not_copy_bool():
    pattern = patterns.dense(2, 3)
    assert patterns.as_pattern(pattern) is pattern


PATTERN_TAKERS = [patterns.as_pattern, patterns.mixing_steps, patterns.mean_path_length]


@pytest.mark.parametrize("take", PATTERN_TAKERS, ids=lambda take: take.__name__)
@pytest.mark.parametrize(
    ("pattern", "error", "got"),
    [
        ([[1, 2], [0, 1]], ValueError, "2"),
        ([[-1]], ValueError, "-1"),
        ([[0.5]], ValueError, "0.5"),
        ([[1.0, math.nan]], ValueError, "nan"),
        ([[math.inf]], ValueError, "inf"),
        ([1, 0], ValueError, "1 dimension"),
        ([[[1]]], ValueError, "3 dimensions"),
        (1, ValueError, "0 dimensions"),
        (np.ones((0, 3)), ValueError, r"\(0, 3\)"),
        (np.ones((3, 0), bool), ValueError, r"\(3, 0\)"),
        ([[1], [1, 0]], TypeError, "list"),
        ("101", TypeError, "str"),
        ([["1"]], TypeError, "<U1"),
        (None, TypeError, "NoneType"),
        ([[1j]], TypeError, "complex"),
        ([[None]], TypeError, "object"),
    ],
    ids=str,
)
def test_a_bad_pattern_is_refused(take, pattern, error, got):
    with pytest.raises(error, match=f"(?s)^pattern takes .*got .*{got}"):
        take(pattern)


def test_as_pattern_names_the_argument():
    with pytest.raises(ValueError, match=r"^layout takes .* got 1 dimensions"):
        patterns.as_pattern([1], "layout")


@pytest.mark.parametrize("take", [patterns.mixing_steps, patterns.mean_path_length])
def test_a_pattern_that_is_not_square_is_refused(take):
    with pytest.raises(ValueError, match=r"^pattern takes as many rows as columns, got \(2, 3\)"):
        take(patterns.dense(2, 3))


WEIGHTS = np.ones((4, 4))
# Maker, good arguments in the order of its signature, the keyword-only ones by name.
SIGNATURES = {
    patterns.dense: {"in_blocks": 4, "out_blocks": 5},
    patterns.random: {"in_blocks": 4, "out_blocks": 5, "density": 0.5, "seed": 0},
    patterns.block_diagonal: {"in_blocks": 4, "out_blocks": 5, "groups": 2},
    patterns.banded: {"in_blocks": 4, "out_blocks": 5, "width": 1},
    patterns.watts_strogatz: {"n": 10, "m": 2, "p": 0.5, "seed": 0},
    patterns.watts_strogatz_2d: {"height": 4, "width": 5, "m": 2, "p": 0.5, "seed": 0},
    patterns.barabasi_albert: {"n": 10, "m": 2, "seed": 0},
    patterns.barabasi_albert_rectangular: {"in_blocks": 4, "out_blocks": 5, "m": 2, "seed": 0},
    patterns.balanced_random: {"in_blocks": 4, "out_blocks": 5, "fan_in": 2, "seed": 0},
    patterns.from_dense: {"weights": WEIGHTS, "block_size": 2, "density": 0.5},
}
NOT_INTEGERS = [2.0, True, "3", None, math.nan, np.float32(2), [2]]
NOT_NUMBERS = [True, "0.5", [0.5], 1j, np.array([0.5, 0.5])]
BAD = {
    "in_blocks": [0, -3, *NOT_INTEGERS],
    "out_blocks": [0, -3, *NOT_INTEGERS],
    "density": [-0.1, 1.1, math.nan, math.inf, *NOT_NUMBERS],
    "p": [-0.1, 1.1, math.nan, None, *NOT_NUMBERS],
    "groups": [0, 5, *NOT_INTEGERS],
    "width": [-1, *NOT_INTEGERS],
    "height": [0, -1, *NOT_INTEGERS],
    "n": [0, -1, 1, *NOT_INTEGERS],
    "m": [0, -1, 10, *NOT_INTEGERS],
    "fan_in": [0, -1, 5, *NOT_INTEGERS],
    "block_size": [0, -2, *NOT_INTEGERS],
    "seed": [-1, True, 1.5, None, "0", np.random.RandomState(0)],
    "weights": [
        np.full((4, 4), np.nan),
        np.array([[1.0, np.inf]]),
        np.ones(4),
        np.ones((0, 4)),
        np.ones((4, 4), complex),
        [["a"]],
        [[1.0], [1.0, 2.0]],
    ],
}
REFUSALS = [
    pytest.param(
        make, good, argument, bad, id=f"{make.__name__}-{argument}-{bad!r}".split(" at 0x")[0][:60]
    )
    for make, good in SIGNATURES.items()
    for argument in good
    for bad in BAD[argument]
]


@pytest.mark.parametrize(("make", "good", "argument", "bad"), REFUSALS)
def test_a_bad_argument_is_refused_by_name(make, good, argument, bad):
    make(**good)
    with pytest.raises((TypeError, ValueError), match=rf"^{argument} takes .*, got "):
        make(**{**good, argument: bad})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: patterns.watts_strogatz(10, 5, 0.1, seed=0),
            "m takes an integer from 1 to 4, got 5",
        ),
        (
            lambda: patterns.watts_strogatz(11, 6, 0.1, seed=0),
            "m takes an integer from 1 to 5, got 6",
        ),
        (lambda: patterns.watts_strogatz(2, 1, 0.1, seed=0), "n takes an integer of at least 3"),
        (lambda: patterns.watts_strogatz_2d(3, 3, 5, 0, seed=0), "m takes an integer from 1 to 4"),
        (lambda: patterns.watts_strogatz_2d(2, 2, 1, 0, seed=0), "height and width .* got 2 x 2"),
        (lambda: patterns.barabasi_albert(5, 5, seed=0), "m takes an integer from 1 to 4, got 5"),
        (lambda: patterns.block_diagonal(9, 3, 4), "groups takes an integer from 1 to 3, got 4"),
        (lambda: patterns.from_dense(WEIGHTS, 2), "exactly one .* got neither"),
        (
            lambda: patterns.from_dense(WEIGHTS, 2, density=1, threshold=1),
            "exactly one .* got both",
        ),
        (lambda: patterns.from_dense(WEIGHTS, 2, threshold=-1), "threshold takes .* got -1"),
        (lambda: patterns.from_dense(WEIGHTS, 2, threshold=math.nan), "threshold takes .* got nan"),
    ],
)
def test_refusals_say_what_would_do(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("make", [make for make in SIGNATURES if "seed" in SIGNATURES[make]])
def test_seed_must_be_given(make):
    with pytest.raises(TypeError, match="seed"):
        make(**{name: value for name, value in SIGNATURES[make].items() if name != "seed"})
