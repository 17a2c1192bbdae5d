"""Bad arguments of numbsparse.torch are refused by their names."""

import numpy as np
import pytest
from arguments_helpers import check_odd
from torch_helpers import ns, nst, torch

X = torch.ones(2, 8)
LAYOUT = ns.Layout([[1, 0], [1, 1]])
W = nst.BlockSparse(torch.ones(3, 4, 4), LAYOUT)
OF_TORCH = [
    X, X.T, X.double(), X.half(), X.int(), X.to_sparse(), X.to("meta"), torch.tensor(3),
    torch.ones(3, 4, 4).to_sparse(), torch.nn.Parameter(X), torch.float32, W, W.T,
    torch.nn.Linear(8, 8), torch.nn.ReLU(),
]  # fmt: skip


def linear():
    return nst.Linear(8, 8, layout=LAYOUT, block_size=4)


def dense():
    return torch.nn.Sequential(torch.nn.Linear(8, 8))


def conv(number):
    return {"in_channels": 8, "out_channels": 8, "kernel_size": number, "block_size": 4}


IMAGES, STEPS = torch.ones(1, 8, 5), torch.ones(2, 3, 8)
CALLS = {  # a call, and arguments that are right
    "BlockSparse": (nst.BlockSparse, lambda: {"values": W.values, "layout": LAYOUT}),
    "matmul": (nst.matmul, lambda: {"x": X, "w": W}),
    "sddmm": (nst.sddmm, lambda: {"a": X.T, "b": X, "layout": LAYOUT, "block_size": 4}),
    "Linear": (nst.Linear, lambda: {"in_features": 8, "out_features": 8, "block_size": 4}),
    "call of Linear": (lambda x: linear()(x), lambda: {"x": X}),
    "from_linear": (nst.Linear.from_linear, lambda: {
        "linear": torch.nn.Linear(8, 8), "pattern": LAYOUT, "block_size": 4}),
    "LSTM": (nst.LSTM, lambda: {"input_size": 8, "hidden_size": 8, "block_size": 4}),
    "call of LSTM": (lambda x, state=None: nst.LSTM(8, 8, block_size=4)(x, state),
        lambda: {"x": STEPS}),
    "Conv1d": (nst.Conv1d, lambda: conv(3)),
    "Conv2d": (nst.Conv2d, lambda: conv((3, 1))),
    "call of Conv1d": (lambda x: nst.Conv1d(**conv(3))(x), lambda: {"x": IMAGES}),
    "sparsify_": (
        lambda model, density, block_size: nst.sparsify_(model, None, density,
            block_size=block_size),
        lambda: {"model": dense(), "density": 1.0, "block_size": 4}),
    "adopt_layouts_": (nst.adopt_layouts_, lambda: {
        "model": linear(), "state_dict": linear().state_dict()}),
    "to_nn_state_dict": (nst.to_nn_state_dict, lambda: {"model": dense(), "block_size": 4}),
    "from_nn_state_dict": (nst.from_nn_state_dict, lambda: {
        "model": linear(), "state": nst.to_nn_state_dict(linear())}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_taken_or_named(name):
    check_odd(*CALLS[name], OF_TORCH)


@pytest.mark.parametrize("argument", ["filter_fn", "pattern"])
@pytest.mark.parametrize("odd", ["a", 3, [1], {}, X, LAYOUT, np.ones((1, 1))], ids=repr)
def test_what_is_no_function_is_refused(argument, odd):
    model = dense()
    before = model[0]
    with pytest.raises(TypeError, match=f"{argument} takes a function"):
        nst.sparsify_(model, block_size=4, **{argument: odd})
    assert model[0] is before


def test_a_state_takes_two_parts():
    h = torch.ones(1, 3, 8)
    for state in ((h,), (h, h, None), (h, h, h), ()):
        with pytest.raises(ValueError, match="state takes h and c of the shape"):
            nst.LSTM(8, 8, block_size=4)(STEPS, state)


@pytest.mark.filterwarnings("ignore:Casting complex:UserWarning")  # of a state of zeros
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int32], ids=str)
@pytest.mark.parametrize("make", [nst.Linear, nst.Conv1d, nst.LSTM])
def test_dtypes_that_no_kernel_takes_are_named(make, dtype):
    more = (3,) if make is nst.Conv1d else ()
    layer = make(8, 8, *more, block_size=4, layout=np.ones((2, 2), bool))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    with pytest.raises(TypeError, match=f"^(x|values) takes .*, got {dtype}"):
        layer(torch.ones(2, 8, 8).to(dtype))
