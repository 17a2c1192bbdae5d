"""What each function of arrays means in NumPy, and what it is drawn from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import drawn_inputs as given
import drawn_meanings as means
import numpy as np
from hypothesis import strategies as st
from scipy.special import expit, logsumexp, softmax

from numbsparse import ops


@dataclass(frozen=True)
class Meaning:
    """A function by name, and how to check a call of it.

    inputs(draw, rng) gives float64 arrays and a dict of other arguments; `call` adapts them. A
    result may differ from `meaning(*arrays, **others)` by `steps` roundings of numbers as large as
    `terms(*arrays, **others)`, by default the result. `order` says how often it is differentiated.
    """

    name: str
    inputs: Callable[..., Any]
    meaning: Callable[..., Any]
    steps: Any = 0  # or a function of the first array
    terms: Callable[..., Any] | None = None
    order: int = 2
    call: Callable[..., Any] = lambda function, arrays, others: function(*arrays, **others)
    view: bool = False  # the result may share memory with what it was given, and have gaps
    roundings: int = 1  # of 16-bit numbers on the way
    wide: tuple[int, ...] = ()  # which arrays are float32 beside 16 bits; -1: the result


NUMBER = 0.75


def with_number(function, arrays, others):
    """function(a, b), or with a number in the place of one of them."""
    a, b = arrays
    return function(*{"left": (NUMBER, b), "right": (a, NUMBER)}.get(others["number"], (a, b)))


def of_two(function):
    return lambda *arrays, **others: with_number(function, arrays, others)


def as_list(function, arrays, others):
    return function(arrays, **others)


def in_row(a):
    """Roundings of a sum along a row, and of a few steps more."""
    return 16 + a.shape[-1]


def in_all(a):
    return 16 + a.size


def kept_or_not(x, rate, seed, call):
    return x * ops.dropout_mask(x.shape, rate, seed, call, "float64", "cpu")


EXPONENTS = st.sampled_from([3, 0, 1, 2, 4, 5, 0.5, -1, -1.5, 2.0, np.int64(3)])
DROPS = {"rate": st.sampled_from([0.5, 0.0, 0.75]), "seed": st.integers(0, 2**40),
         "call": st.integers(0, 9)}  # fmt: skip
DTYPES = st.sampled_from(["float32", "float64"])

BOTH = [  # of numbsparse.ops and of nn.functional
    Meaning("negative", given.each(-9, 9), np.negative),
    Meaning("exp", given.each(-9, 9), np.exp, 8),
    Meaning("expm1", given.each(-9, 9), np.expm1, 8),
    Meaning("log", given.each(0.01, 9), np.log, 8, lambda x: 1 + abs(np.log(x))),
    Meaning("sqrt", given.each(0.01, 9), np.sqrt, 8),
    Meaning("tanh", given.each(-9, 9), np.tanh, 8),
    Meaning("sigmoid", given.each(-9, 9), expit, 8),
    Meaning("relu", given.away_from_0(given.each(-9, 9)), lambda x: np.maximum(x, 0)),
    Meaning("elu", given.away_from_0(given.each(-9, 9)), means.elu, 8),
    Meaning("softplus", given.each(-9, 9), lambda x: np.logaddexp(0, x), 8),
    Meaning("gelu", given.each(-9, 9), means.gelu, 8, lambda x: 1 + abs(x)),
    Meaning("cast", given.each(-9, 9, dtype=DTYPES), lambda x, dtype: x.astype(dtype), order=0),
    Meaning("power", given.each(0.5, 2, exponent=EXPONENTS), lambda x, exponent: x**exponent, 16),
    Meaning("add", given.two(), of_two(np.add), call=with_number),
    Meaning("subtract", given.two(), of_two(np.subtract), call=with_number),
    Meaning("multiply", given.two(), of_two(np.multiply), call=with_number),
    Meaning("divide", given.two(), of_two(np.divide), 2, call=with_number),
    Meaning("sum", given.reduced(), np.sum, in_all, lambda a, **how: abs(a).sum(**how)),
    Meaning("mean", given.reduced(1), np.mean, in_all, lambda a, **how: abs(a).mean(**how)),
    Meaning("softmax", given.rows(), lambda x: softmax(x, -1), in_row),
    Meaning("log_softmax", given.rows(), means.log_softmax, in_row,
            lambda x: 1 + abs(means.log_softmax(x))),
    Meaning("logsumexp", given.rows(), lambda x: logsumexp(x, -1), in_row,
            lambda x: 1 + abs(x).max(-1)),
    Meaning("concat_elu", given.away_from_0(given.rows()), means.concat_elu, 8),
    Meaning("glu", given.rows(each=2), means.glu, 16),
    Meaning("broadcast_to", given.to_larger, np.broadcast_to),
    Meaning("reshape", given.other_shape, lambda x, shape: x.reshape(shape), view=True),
    Meaning("transpose", given.other_order, lambda x, axes: x.transpose(axes), view=True),
    Meaning("getitem", given.indexed, lambda x, key: x[key], view=True),
    Meaning("concatenate", given.joined(False), lambda *a, axis: np.concatenate(a, axis),
            call=as_list),
    Meaning("stack", given.joined(True), lambda *a, axis: np.stack(a, axis), call=as_list),
]  # fmt: skip

OF_TENSORS = [
    Meaning("abs", given.away_from_0(given.each(-9, 9)), np.abs),
    Meaning("log_sigmoid", given.each(-9, 9), lambda x: -np.logaddexp(0, -x), 8),
    Meaning("split", given.cut, lambda x, sections, axis: np.split(x, sections, axis), view=True),
    Meaning("unbind", given.parted, lambda x, axis: list(np.moveaxis(x, axis, 0)), view=True),
    Meaning("layer_norm", given.rows("row", "row"), means.layer_norm, in_row,
            means.layer_norm_terms, roundings=3),
    Meaning("embedding", given.looked_up, lambda table, indices: table[indices]),
    Meaning("cross_entropy", given.classified, lambda x, targets: means.losses(x, targets).mean(),
            in_all, lambda x, targets: 1 + abs(means.losses(x, targets)).mean(),
            wide=(-1,)),
    Meaning("mse_loss", given.alike(1), lambda a, b: ((a - b) ** 2).mean(), in_all,
            roundings=4),
    Meaning("dropout", given.each(-3, 3, **DROPS), kept_or_not),
]  # fmt: skip

OF_ARRAYS = [
    Meaning("maximum", given.two(-3, 3), of_two(np.maximum), call=with_number),
    Meaning("max", given.reduced(1), np.max),
    Meaning("copy", given.each(-9, 9), lambda x: x),
    Meaning("sum_to", given.to_smaller, means.sum_to, in_all,
            lambda a, shape: means.sum_to(abs(a), shape), view=True),
    Meaning("put", given.put_back, means.put,
            call=lambda f, arrays, others: f(others["shape"], others["key"], *arrays)),
    Meaning("full_like", given.each(-9, 9), lambda x: np.full(x.shape, 0.5),
            call=lambda f, arrays, others: f(*arrays, 0.5)),
    Meaning("zeros_like", given.each(-9, 9), np.zeros_like),
    Meaning("gelu_tanh", given.each(-9, 9), means.gelu_tanh, 8, lambda x: 1 + abs(x)),
    Meaning("relu_grad", given.alike(), means.relu_grad),
    Meaning("stretched_sigmoid", given.each(-9, 9), means.stretched_sigmoid, 8,
            lambda x: 1 + 0 * x),
    Meaning("stretched_sigmoid_grad", given.alike(), means.stretched_sigmoid_grad, 16,
            lambda x, dy: abs(dy)),
    Meaning("elu_grad", given.alike(), means.elu_grad, 8),
    Meaning("gelu_grad", given.alike(), means.gelu_grad, 16, lambda x, dy: abs(dy) * 4),
    Meaning("gelu_tanh_grad", given.alike(), means.gelu_tanh_grad, 16, lambda x, dy: abs(dy) * 4),
    Meaning("concat_elu_grad", given.rows(2), means.concat_elu_grad, 16,
            means.concat_elu_grad_terms),
    Meaning("glu_grad", given.rows(0.5, each=2), means.glu_grad, 16, means.glu_grad_terms),
    Meaning("softmax_grad", given.rows(1, low=0.01, high=1.0), means.softmax_grad, in_row,
            means.softmax_grad_terms),
    Meaning("log_softmax_grad", given.rows(1, high=0.0), means.log_softmax_grad, in_row,
            means.log_softmax_grad_terms),
    Meaning("layer_norm", given.rows(), means.layer_norm, in_row, means.layer_norm_terms,
            call=lambda f, arrays, others: f(*arrays, 1e-5)[0]),
    Meaning("layer_norm_grad", given.rows("rows", 1), means.layer_norm_grad, in_row,
            means.layer_norm_grad_terms, wide=(1,)),
    Meaning("take_rows", given.looked_up, lambda table, indices: table[indices]),
    Meaning("sum_rows", given.added_up, means.sum_rows, in_all,
            lambda dy, **how: means.sum_rows(abs(dy), **how)),
    Meaning("cross_entropy", given.classified_rows, lambda x, _, targets: means.losses(x, targets),
            in_row, lambda x, _, targets: 1 + means.losses(x, targets), wide=(-1,),
            call=lambda f, arrays, others: f(arrays[0], others["targets"])[0]),
    Meaning("cross_entropy_grad", given.classified_rows, means.cross_entropy_grad, 4,
            lambda p, d, targets: abs(d)[:, None] + 0 * p, wide=(1,),
            call=lambda f, arrays, others: f(arrays[0], others["targets"], arrays[1])),
    Meaning("global_norm", given.some, means.norm, lambda a: 500, call=as_list, wide=(-1,)),
]  # fmt: skip
