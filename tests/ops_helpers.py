"""Where the tests of the ops run, and how far a result may be from the oracle."""

from dataclasses import dataclass

import numpy as np
import pytest
from conftest import HAS_BFLOAT16

from numbsparse import device
from numbsparse.dtypes import as_dtype, finfo


@dataclass(frozen=True)
class Home:
    """A place and a dtype."""

    place: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.place}-{self.dtype}"

    @property
    def eps(self) -> float:
        """The relative error of one rounding to the dtype."""
        return float(finfo(self.dtype).eps) / 2

    @property
    def sum_eps(self) -> float:
        """The same for the sums: 16-bit floats are summed in float32."""
        return 2.0**-53 if self.dtype == "float64" else 2.0**-24

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    def send(self, array, dtype=None, form="C"):
        """The array in this home: in C order, as the `.T` of another, or each second of a row."""
        if self.place == "cuda" and not device.is_available():
            pytest.skip(device.why_unavailable())
        array = np.asarray(array, as_dtype(dtype or self.dtype))
        put = device.to_device if self.place == "cuda" else np.array
        if form == "T":
            return put(np.array(array.T, order="C")).T
        if form == "slice" and array.ndim:
            return put(np.repeat(array, 2, axis=-1))[..., ::2]
        return put(array)

    def fetch(self, result, dtype=None):
        """The result in float64; it must be a contiguous array of this place and dtype."""
        assert isinstance(result, device.DeviceArray if self.place == "cuda" else np.ndarray)
        assert result.dtype == (dtype or self.dtype)
        contiguous = result.is_contiguous if self.place == "cuda" else result.flags.c_contiguous
        assert contiguous
        return host(result).astype(np.float64)

    def rounded(self, array):
        """What the array is once sent, in float64 for the oracle."""
        return np.asarray(array, as_dtype(self.dtype)).astype(np.float64)


HOMES = [
    Home("cpu", "float32"),
    Home("cpu", "float64"),
    Home("cuda", "float32"),
    Home("cuda", "float16"),
]
if HAS_BFLOAT16:
    HOMES.append(Home("cuda", "bfloat16"))
in_all_homes = pytest.mark.parametrize("home", HOMES, ids=str)
in_all_forms = pytest.mark.parametrize("form", ["C", "T", "slice"])
on_both_places = pytest.mark.parametrize("home", [HOMES[0], HOMES[2]], ids=str)


def host(array):
    return array.numpy() if isinstance(array, device.DeviceArray) else array


def assert_close(home, got, expected, *, steps=4, magnitude=None):
    """Within `steps` roundings of sums of that magnitude, and one rounding of the result."""
    expected = np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    magnitude = np.abs(expected) if magnitude is None else magnitude
    smallest = float(finfo(home.dtype).smallest_subnormal)
    bound = steps * home.sum_eps * magnitude + home.eps * np.abs(expected) + smallest
    error = np.abs(got - expected)
    assert np.all(error <= bound), f"off by {np.max(error / bound):.2f} times the bound"


def numeric_grad(function, x, dy, step=1e-6):
    """The gradient of sum(function(x) * dy) by central differences, in float64."""
    grad = np.empty_like(x)
    for i in np.ndindex(x.shape):
        above, below = x.copy(), x.copy()
        above[i] += step
        below[i] -= step
        grad[i] = np.sum((function(above) - function(below)) * dy) / (2 * step)
    return grad
