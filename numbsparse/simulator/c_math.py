"""`math` as kernels have it on a GPU: where Python raises an error, results are infinite or NaN.

>>> math.log(0.0), math.exp(1000.0), math.sqrt(-1.0), math.pow(0.0, -1.0)
(-inf, inf, nan, inf)
"""

import math as python
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace

import numpy as np

OTHER_NAMES = {"acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "atanh": "arctanh"}
OTHER_NAMES |= {"pow": "power"}  # NumPy's
NAMES = ["cos", "cosh", "exp", "expm1", "fmod", "ldexp", "log", "log10", "log1p", "log2", "sin"]
NAMES += ["sinh", "sqrt", "tan", *OTHER_NAMES]


def _as_in_c(name: str) -> Callable[..., float]:
    function = getattr(python, name)
    unlimited = getattr(np, OTHER_NAMES.get(name, name))

    @wraps(function)
    def call(*args: float) -> float:
        try:
            result: float = function(*args)
        except (OverflowError, ValueError):  # "math range error", "math domain error"
            with np.errstate(all="ignore"):
                result = float(unlimited(*args))
        return result

    return call


math = SimpleNamespace(**vars(python) | {name: _as_in_c(name) for name in NAMES})
