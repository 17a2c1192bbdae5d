"""The floating-point dtypes; bfloat16 is one where the package ml_dtypes is installed.

NumPy has no bfloat16 of its own. Nothing here loads ml_dtypes before bfloat16 is asked for by name;
an array that has the dtype comes from those who loaded it.
"""

from contextlib import suppress
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
NO_NUMBERS = "OUSMm"  # the kinds of dtypes of objects, strings, dates


def as_dtype(dtype: Any) -> np.dtype:
    """`numpy.dtype(dtype)`, to which "bfloat16" is a name too, and None is none.

    Raises ImportError, which says what to install, for "bfloat16" where ml_dtypes is missing;
    TypeError for what is no dtype.
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        return bfloat16()
    with suppress(TypeError, ValueError):
        known = np.dtype(object if dtype is None else dtype)  # of None NumPy makes float64
        if known.itemsize and known.kind not in NO_NUMBERS:
            return known
    raise TypeError(f'dtype takes a dtype of NumPy, or its name, as "float32", got {dtype!r}')


def float_dtype(dtype: Any) -> np.dtype:
    """`as_dtype`, of what is trained: floats."""
    known = as_dtype(dtype)
    if known.name not in FLOATS or not known.isnative:
        raise TypeError(f"dtype takes {', '.join(FLOATS)}, got {known}")
    return known


def bfloat16() -> np.dtype:
    """The dtype of ml_dtypes: the upper 16 bits of a float32."""
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ImportError(
            "bfloat16 needs the package ml_dtypes: pip install 'numbsparse[bfloat16]'"
        ) from None
    return np.dtype(bfloat16)


def as_array(x: Any, argument: str = "x", takes: str = "an array of numbers") -> np.ndarray:
    """`numpy.asarray(x)`, of a bfloat16 tensor of torch on the CPU too, sharing its memory.

    Raises TypeError for a masked array, whose mask would be lost, and for what holds no numbers.
    """
    refuse_masked(x, argument)
    if str(getattr(x, "dtype", "")) != "torch.bfloat16":
        try:
            array = np.asarray(x)
        except (RuntimeError, TypeError, ValueError) as error:
            got = f"{type_name(x)}{_room_of(x)}: {error}"
            raise TypeError(f"{argument} takes {takes}, got {got}") from error
        if array.dtype.kind in NO_NUMBERS or array.dtype.hasobject:
            got = type_name(x) if not array.ndim else f"one of {array.dtype}"
            raise TypeError(f"{argument} takes {takes}, got {got}")
        return array
    import torch

    return x.view(torch.int16).numpy().view(bfloat16())


def _room_of(x: Any) -> str:
    """Who takes what another library records or traces, in brackets; or nothing."""
    library = type(x).__module__.partition(".")[0].removesuffix("lib")
    if library not in ("torch", "jax"):
        return ""
    return f" (numbsparse.{library} takes what {library} differentiates or traces)"


def refuse_masked(x: Any, argument: str) -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{argument} takes no masked array, whose mask would be lost: fill it, .filled(0.0)"
        )


def type_name(x: Any) -> str:
    """What users call the type of x: "int", "torch.Tensor", "numbsparse.torch.BlockSparse"."""
    module, name = type(x).__module__, type(x).__qualname__
    library, room, *_ = (*module.split("."), "")
    if library == "numbsparse" and room in ("torch", "jax"):
        library = f"{library}.{room}"
    return name if library == "builtins" else f"{library}.{name}"


def check_kind(argument: str, value: Any, kinds: Any, takes: str) -> None:
    """Refuse what is of another type; `takes` says what was expected."""
    if not isinstance(value, kinds):
        raise TypeError(f"{argument} takes {takes}, got {type_name(value)}")


def is_bfloat16(dtype: np.dtype) -> bool:
    return dtype.kind == "V" and dtype.name == "bfloat16"


def is_floating(dtype: np.dtype) -> bool:
    """Whether numbers of this dtype have gradients."""
    return dtype.kind == "f" or is_bfloat16(dtype)


def finfo(dtype: Any) -> Any:
    """`numpy.finfo(dtype)`, of bfloat16 too."""
    dtype = as_dtype(dtype)
    if not is_bfloat16(dtype):
        return np.finfo(dtype)
    import ml_dtypes

    return ml_dtypes.finfo(dtype)


def from_file(array: np.ndarray) -> np.ndarray:
    """An array as it was before `numpy.save`, which writes bfloat16 as two bytes without a name."""
    return array.view(bfloat16()) if array.dtype.str == "|V2" else array
