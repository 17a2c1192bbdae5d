"""What recurrent layers take: steps of inputs, a state (h, c), and layouts of several weights."""

from math import inf
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor
from numbsparse.nn.linear import is_list_of_layouts
from numbsparse.ops.lstm import check_steps
from numbsparse.patterns.checks import integer, number

State = tuple[Tensor, Tensor]


def check(input_size: Any, hidden_size: Any, forget_bias: Any, **dropout: Any) -> None:
    """Refuse what no recurrent layer can be made of."""
    integer("input_size", input_size)
    integer("hidden_size", hidden_size)
    number("forget_bias", forget_bias, least=-inf)
    for name, p in dropout.items():
        number(name, p, below=1)


def checked_steps(x: Any, features: int) -> Tensor:
    """x (time, batch, features), refused where it has other axes or no step."""
    x = as_tensor(x)
    check_steps(x, features)
    return x


def checked_state(
    x: Tensor, state: Any, shape: tuple[int, ...], weight: Tensor, of_c: tuple[int, ...] = ()
) -> State:
    """h and c as Tensors; x and they are refused where they do not fit `weight`, or this shape.

    `of_c` is that of c where it is another one.
    """
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise TypeError(f"state takes (h, c), got {type(state).__name__}")
    h, c = (as_tensor(part, name) for part, name in zip(state, "hc", strict=True))
    for name, part, takes in (("x", x, x.shape), ("h", h, shape), ("c", c, of_c or shape)):
        dtype = ops.state_dtype(weight.dtype) if name == "c" else weight.dtype
        if part.shape != takes:
            raise ValueError(f"{name} takes the shape {takes}, got {part.shape}")
        if part.dtype != dtype:
            raise TypeError(f"{name} takes {dtype} in this layer, got {part.dtype}")
        if part.device != weight.device:
            raise ValueError(
                f"{name} takes the device of the weights, {weight.device}, got {part.device}"
            )
    return h, c


def zeros(shape: tuple[int, ...], weight: Tensor) -> State:
    """(h, c) of zeros, where the weights are."""
    dtypes = weight.dtype, ops.state_dtype(weight.dtype)
    h, c = (Tensor(ops.zeros(shape, dtype, weight.device)) for dtype in dtypes)
    return h, c


def layout_of_each(layout: Any, count: int, takes: str) -> list[Any]:
    """The layouts of so many weights: a list of them, or one for all; `takes` says what fits."""
    if not is_list_of_layouts(layout):
        return [layout] * count
    if len(layout) != count:
        raise ValueError(f"{takes}, got {len(layout)}")
    return list(layout)
