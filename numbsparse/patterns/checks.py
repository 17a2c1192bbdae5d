"""What a pattern is, and the checks of the arguments that makers of patterns take."""

import math
from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from numbsparse.dtypes import as_array

Pattern: TypeAlias = NDArray[np.bool_]
Seed: TypeAlias = int | np.random.Generator

INTEGER = (int, np.integer)
REAL = (int, float, np.integer, np.floating)
BOOL = (bool, np.bool_)
NO_NUMBER = (*BOOL, np.timedelta64)  # which NumPy has among its integers
LARGEST = 2**31 - 1  # of sizes, which kernels count in 32 bits
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)  # those that kernels serve


def as_pattern(pattern: Any, argument: str = "pattern") -> Pattern:
    """`pattern` as a bool array (in_blocks, out_blocks), checked.

    Parameters
    ----------
    pattern : array_like, (in_blocks, out_blocks)
        Booleans, or numbers that are all 0 or 1. Both sides must be at least 1. A bool array comes
        back as it is, without a copy.
    argument : str
        The name that errors give it.

    Raises
    ------
    TypeError
        If it does not hold booleans or numbers.
    ValueError
        If it is not 2-D, a side is 0, or an entry is neither 0 nor 1 (NaN included).

    Examples
    --------
    >>> import numbsparse as ns
    >>> ns.patterns.as_pattern([[1, 0, 0], [0, 1, 1]])
    array([[ True, False, False],
           [False,  True,  True]])
    """
    takes = "a 2-D array of booleans (or of zeros and ones), (in_blocks, out_blocks)"
    array = real_array(argument, pattern, takes)
    if array.ndim != 2:
        raise ValueError(f"{argument} takes {takes}, got {array.ndim} dimensions")
    if 0 in array.shape:
        raise ValueError(f"{argument} takes at least one block on each side, got {array.shape}")
    if array.dtype == bool:
        return array
    kept = array == 1
    strange = array[~kept & (array != 0)]
    if strange.size:
        raise ValueError(f"{argument} takes nothing but 0 and 1, got {strange[0]}")
    return kept


def real_array(argument: str, value: Any, takes: str) -> np.ndarray:
    """`value` as an array of booleans or real numbers; `takes` says what was expected."""
    array = as_array(value, argument, takes)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{argument} takes {takes}, got dtype {array.dtype}")
    return array


def as_square(pattern: Any) -> Pattern:
    pattern = as_pattern(pattern)
    if pattern.shape[0] != pattern.shape[1]:
        raise ValueError(f"pattern takes as many rows as columns, got {pattern.shape}")
    return pattern


def integer(argument: str, value: Any, least: int = 1, most: float | None = None) -> int:
    """`value` as an int between `least` and `most`, or the largest size."""
    if type(value) is int and least <= value <= (LARGEST if most is None else most):
        return value
    takes = f"an integer of at least {least}"
    if most is None:
        most = LARGEST
        takes += f" and at most {LARGEST}" if isinstance(value, int) and value > LARGEST else ""
    elif most < math.inf:
        takes = f"an integer from {least} to {most}"
    if isinstance(value, NO_NUMBER) or not isinstance(value, INTEGER):
        raise TypeError(f"{argument} takes {takes}, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{argument} takes {takes}, got {value!r}")
    return int(value)


def check_block_size(block_size: Any) -> int:
    """Refuse blocks that no kernel serves: of a layer when it is made, not when it is used."""
    if (size := integer("block_size", block_size)) not in BLOCK_SIZES:
        raise ValueError(f"block_size takes one of {BLOCK_SIZES}, got {block_size}")
    return size


def number(
    argument: str,
    value: Any,
    most: float = math.inf,
    least: float = 0,
    *,
    below: float = math.inf,
) -> float:
    """`value` as a float between `least` and `most`, or less than `below`; NaN is refused."""
    if type(value) is float and least <= value <= most and value < below:
        return value  # words for an error take ten times as long
    takes, last = "a number", f"{most}" if below == math.inf else f"below {below}"
    if least > -math.inf:
        takes += f" of at least {least}" if last == "inf" else f" from {least} to {last}"
    if isinstance(value, NO_NUMBER) or not isinstance(value, REAL):
        raise TypeError(f"{argument} takes {takes}, got {value!r}")
    if not least <= value <= most or value >= below:
        raise ValueError(f"{argument} takes {takes}, got {value!r}")
    return float(value)


def flag(argument: str, value: Any) -> bool:
    """`value` as a bool: True, False, or 0 or 1 of another type."""
    number = isinstance(value, INTEGER) and not isinstance(value, np.timedelta64)
    if not (number or isinstance(value, BOOL)) or value not in (0, 1):
        raise TypeError(f"{argument} takes True or False, got {value!r}")
    return bool(value)


def word(argument: str, value: Any, words: Collection[str]) -> str:
    """`value`, which is one of the words."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{argument} takes one of {', '.join(words)}, got {value!r}")
    return value


def pair(argument: str, takes: str, value: Any) -> tuple[Any, Any]:
    """The two of `value`, of any kind; `takes` says what was expected."""
    try:
        first, second = value
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument} takes {takes}, got {value!r}") from None
    return first, second


def any_generator(seed: Any) -> np.random.Generator:
    """`numpy.random.default_rng(seed)`, which takes None and sequences of integers too."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        takes = "an integer of at least 0, a numpy.random.Generator or None"
        raise type(error)(f"seed takes {takes}, got {seed!r}") from None


def generator(seed: Any) -> np.random.Generator:
    takes = "seed takes an integer of at least 0 or a numpy.random.Generator"
    if isinstance(seed, np.random.Generator):
        return seed
    if isinstance(seed, NO_NUMBER) or not isinstance(seed, INTEGER):
        raise TypeError(f"{takes}, got {seed!r}")
    if seed < 0:
        raise ValueError(f"{takes}, got {seed!r}")
    return np.random.default_rng(int(seed))
