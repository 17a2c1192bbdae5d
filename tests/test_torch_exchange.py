"""Trained values go from models of numbsparse.torch to those of numbsparse.nn, and back."""

from importlib.util import find_spec

import numpy as np
import pytest
from conftest import needs_bfloat16
from npz_helpers import same
from torch_helpers import drawn, layout, ns, nst, torch

LINEAR, CONV, LSTM = layout(3, 4), layout(3, 2, seed=1), layout(2, 2, seed=2)
SAME = {"block_size": 4}


def theirs(dtype=torch.float64, layouts=(LINEAR, CONV, LSTM)):
    linear, conv, lstm = layouts
    tied = nst.Linear(8, 8, **SAME)
    parts = {
        "fc": nst.Linear(10, 13, layout=linear, **SAME),
        "norm": torch.nn.LayerNorm(13),
        "conv": nst.Conv2d(10, 8, 3, bias=False, layout=conv, **SAME),
        "lstm": nst.LSTM(6, 7, 2, layout=lstm, **SAME),
        "twice": torch.nn.ModuleList([tied, tied]),
        "head": torch.nn.Linear(13, 35),
    }
    return torch.nn.ModuleDict(parts).to(dtype)


class Ours(ns.nn.Module):
    def __init__(self, dtype="float64"):
        super().__init__()
        options = {**SAME, "dtype": dtype}
        tied = ns.nn.Linear(8, 8, **options)
        self.fc = ns.nn.Linear(10, 13, layout=LINEAR, **options)
        self.norm = ns.nn.LayerNorm(13, dtype=dtype)
        self.conv = ns.nn.Conv2d(10, 8, 3, bias=False, layout=CONV, **options)
        self.lstm = ns.nn.LSTM(6, 7, 2, layout=LSTM, **options)
        self.twice = [tied, tied]
        self.head = ns.nn.Linear(13, 35, dtype=dtype)  # dense, in blocks of 32


def through(state, way, folder):
    """The state as it is, or out of a file."""
    if way == "memory":
        return state
    if way == ".safetensors":
        pytest.importorskip("safetensors", reason="safetensors is not installed")
    ns.save(folder / f"state{way}", state)
    return ns.load(folder / f"state{way}")


def assert_alike(one, other):
    """That two models compute the same, one of torch and one of ours."""
    x, images, steps = drawn(3, 10), drawn(2, 10, 4, 5), drawn(4, 3, 6)
    pairs = [
        (one["norm"](one["fc"](x)), other.norm(other.fc(x.detach().numpy()))),
        (one["conv"](images).movedim(1, -1), other.conv(images.detach().movedim(1, -1).numpy())),
        (one["lstm"](steps)[0], other.lstm(steps.detach().numpy())[0]),
        (one["twice"][1](x[:, :8]), other.twice[0](x[:, :8].detach().numpy())),
        (one["head"](one["fc"](x)), other.head(other.fc(x.detach().numpy()))),
    ]
    for a, b in pairs:
        np.testing.assert_allclose(a.detach().numpy(), b.numpy(), rtol=0, atol=1e-12)


WAYS = ["memory", ".npz", ".safetensors"]


@pytest.mark.parametrize("way", WAYS)
def test_from_torch(way, tmp_path):
    one, other = theirs(), Ours()
    state = nst.to_nn_state_dict(one)
    other.load_state_dict(through(state, way, tmp_path))
    assert_alike(one, other)
    with torch.no_grad():
        one["fc"].bias.add_(1)
    assert abs(state["fc.bias"] - one["fc"].bias.detach().numpy()).min() > 0.5  # own memory


@pytest.mark.parametrize("way", WAYS)
def test_to_torch_with_other_layouts(way, tmp_path):
    other, one = Ours(), theirs(layouts=(layout(3, 4, seed=7), None, None))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
    state = nst.from_nn_state_dict(one, through(other.state_dict(), way, tmp_path))
    with pytest.raises(RuntimeError, match=r"fc\.weight_pattern is of another layout"):
        one.load_state_dict(state)
    nst.adopt_layouts_(one, state)
    one.load_state_dict(state)
    optimizer.step()
    assert_alike(one, other)


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", pytest.param("bfloat16", marks=needs_bfloat16)]
)
@pytest.mark.parametrize("way", WAYS)
def test_there_and_back(way, dtype, tmp_path):
    one, again = theirs(getattr(torch, dtype)), theirs(getattr(torch, dtype))
    ours = Ours(dtype)
    ours.load_state_dict(through(nst.to_nn_state_dict(one), way, tmp_path))
    again.load_state_dict(nst.from_nn_state_dict(again, through(ours.state_dict(), way, tmp_path)))
    right = one.state_dict()
    for name, value in again.state_dict().items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name])


@pytest.mark.skipif(not find_spec("safetensors"), reason="safetensors is not installed")
def test_files_of_the_package_without_a_helper(tmp_path):
    """Where features are whole blocks, a Linear's and a convolution's names and tensors agree."""
    import safetensors.torch

    one = nst.Linear(12, 16, layout=LINEAR, **SAME)
    ours = ns.nn.Linear(12, 16, layout=LINEAR, seed=0, **SAME)
    safetensors.torch.save_file(one.state_dict(), tmp_path / "theirs.safetensors")
    before = ours.state_dict()
    ours.load_state_dict(ns.load(tmp_path / "theirs.safetensors"))
    np.testing.assert_array_equal(ours.bias.numpy(), one.bias.detach().numpy())
    np.testing.assert_array_equal(ours.weight.data.data, one.weight.detach().numpy())
    ns.save(tmp_path / "ours.safetensors", before)
    one.load_state_dict(safetensors.torch.load_file(tmp_path / "ours.safetensors"))
    same(nst.to_nn_state_dict(one), before)


def test_a_dropout_s_numbers_stay_its_own():
    """torch's has none to give, and takes none."""
    ours = ns.nn.Sequential(ns.nn.Dropout(0.5), ns.nn.Linear(8, 8, **SAME))
    one = torch.nn.Sequential(torch.nn.Dropout(0.5), nst.Linear(8, 8, **SAME))
    one.load_state_dict(nst.from_nn_state_dict(one, ours.state_dict()))
    ours.load_state_dict(ours.state_dict() | nst.to_nn_state_dict(one))
    np.testing.assert_array_equal(ours[1].weight.data.data, one[1].weight.detach().numpy())


def test_tensors_are_not_those_of_the_state():
    layer, state = nst.Linear(8, 8, **SAME), ns.nn.Linear(8, 8, **SAME).state_dict()
    tensors = nst.from_nn_state_dict(layer, state)
    state["bias"][:] = state["weight"].values[:] = 9
    assert not any((tensors[name] == 9).any() for name in ("weight", "bias"))
    del state["weight"]
    assert list(nst.from_nn_state_dict(layer, state)) == ["bias"]


def test_a_number_is_an_array_of_the_model_s_dtype():
    one = torch.nn.BatchNorm1d(4)
    state = nst.to_nn_state_dict(one) | {"num_batches_tracked": 7}  # as a file gives it back
    one.load_state_dict(nst.from_nn_state_dict(one, state))
    assert one.num_batches_tracked.item() == 7
    assert one.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [
        ({"weight": np.zeros((2, 4, 4))}, TypeError, r"state\['weight'\] takes a BlockSparse"),
        (
            ns.nn.Linear(11, 8, **SAME).state_dict(),
            ValueError,
            "takes 10 x 8 features in blocks of 4, got BlockSparse.11 x 8",
        ),
        (ns.nn.Linear(10, 8, block_size=8).state_dict(), ValueError, "in blocks of 4, got"),
        ({}, RuntimeError, "Missing key.* in state_dict: .*weight"),
        (
            ns.nn.Linear(10, 8, **SAME).state_dict() | {"gain": np.ones(3)},
            RuntimeError,
            'Unexpected key.* in state_dict: "gain"',
        ),
    ],
)
def test_refused(state, error, says):
    layer = nst.Linear(10, 8, **SAME)
    with pytest.raises(error, match=says):
        layer.load_state_dict(nst.from_nn_state_dict(layer, state))


def test_a_layer_of_torch_s_without_a_matrix_takes_none():
    with pytest.raises(TypeError, match=r"state\['weight'\] takes an array"):
        nst.from_nn_state_dict(torch.nn.LayerNorm(8), ns.nn.Linear(8, 8, **SAME).state_dict())


def test_a_dense_layer_of_torch_s_takes_any_layout():
    """Blocks that are not there are zeros; a weight that an embedding shares stays an array."""
    ours = ns.nn.Linear(10, 13, layout=LINEAR, **SAME)
    dense = torch.nn.Linear(10, 13)
    dense.load_state_dict(nst.from_nn_state_dict(dense, ours.state_dict()))
    np.testing.assert_array_equal(dense.weight.detach().numpy(), ours.weight.data.toarray().T)
    state = nst.to_nn_state_dict(dense, block_size=8)
    assert state["weight"].block_size == 8
    with pytest.raises(ValueError, match=r"takes 13 x 10 features .* got BlockSparse.10 x 13"):
        nst.from_nn_state_dict(torch.nn.Linear(13, 10), state)
    tied = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 5, bias=False))
    tied[1].weight = tied[0].weight
    state = nst.to_nn_state_dict(tied)
    np.testing.assert_array_equal(state.pop("0.weight"), tied[0].weight.detach().numpy())
    assert not state
