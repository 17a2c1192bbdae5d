"""How accurate float32 products are by default: one setting for the whole process."""

from numbsparse.kernels.matmul import PRECISIONS
from numbsparse.patterns.checks import word

_default = "highest"


class set_precision:
    """How accurate float32 products are, from now on or in a `with` block.

    Parameters
    ----------
    precision : str
        "highest", which it is at first: as accurate as a float32 product. "high": tensor cores may
        round the operands to tf32, 10 bits of mantissa, which is several times as fast; sums are
        float32. The words of `torch.set_float32_matmul_precision` and
        `jax.default_matmul_precision`.

    A call's own `precision=` overrides it, and a gradient is computed as accurately as the product
    that it belongs to. Products of other dtypes have one precision. Holds for all threads.

    Raises ValueError for another word.

    Examples
    --------
    >>> import numbsparse as ns
    >>> with ns.set_precision("high"):
    ...     pass  # products on tf32 tensor cores, where there are some
    """

    def __init__(self, precision: str):
        global _default
        self._precision = word("precision", precision, PRECISIONS)
        self._at_first: str | None = _default
        self._before, _default = list[str](), precision

    def __enter__(self) -> None:
        global _default
        self._before.append(self._at_first or _default)
        self._at_first, _default = None, self._precision

    def __exit__(self, *error: object) -> None:
        global _default
        _default = self._before.pop()

    def __repr__(self) -> str:
        return f"set_precision({self._precision!r})"


def checked_precision(precision: str | None) -> str:
    """The precision of a call: its own, or the default."""
    return _default if precision is None else word("precision", precision, PRECISIONS)


def own_precision(precision: str | None) -> str | None:
    """A layer's own precision, checked; None stays, for the default at the time of each call."""
    return None if precision is None else word("precision", precision, PRECISIONS)
