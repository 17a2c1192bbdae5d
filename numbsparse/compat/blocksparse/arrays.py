"""Arrays of any library, led through numbsparse's Tensors."""

from collections.abc import Callable, Sequence
from typing import Any

from numbsparse.autograd import Tensor, as_tensor
from numbsparse.device import in_library_of


def check_shape(argument: str, array: Any, shape: Sequence[int], why: str = "") -> None:
    got = tuple(getattr(array, "shape", ()))
    if got != tuple(shape):
        raise ValueError(f"{argument} takes an array of shape {tuple(shape)}, got {got}{why}")


def is_torch(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"


def run(compute: Callable[..., Tensor], *arrays: Any) -> Any:
    """compute(*Tensors), None staying None: a Tensor if one was given, else as the first array is.

    Raises TypeError for a tensor of torch that requires a gradient, which would not come.
    """
    if any(is_torch(array) and array.requires_grad for array in arrays):
        raise TypeError("torch's tape does not see this: use numbsparse.torch, or .detach()")
    tensors = [array if array is None else as_tensor(array) for array in arrays]
    if any(isinstance(array, Tensor) for array in arrays):
        return compute(*tensors)
    return in_library_of(arrays[0], compute(*tensors).data)
