"""State dicts and checkpoints of models, whole or not at all; what is no such is refused."""

import pickle
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from conftest import host
from drawn import draws
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import nn
from numbsparse.dtypes import type_name

pytestmark = pytest.mark.usefixtures("cheap_products")


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.stages = [nn.Embedding(7, 8, seed=rng), nn.Dropout(0.5, seed=1)]
        self.lstm = nn.LSTM(8, 16, layout=np.eye(2), block_size=8, seed=rng)
        self.head = nn.Sequential(
            nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 7, block_size=8, seed=rng)
        )

    def forward(self, codes):
        x = codes
        for stage in self.stages:
            x = stage(x)
        return self.head(self.lstm(x)[0])


NAMES = [
    "stages.0.weight", "lstm.layers.0.weight_ih", "lstm.layers.0.weight_hh", "lstm.layers.0.bias",
    "head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias",
]  # fmt: skip


BIAS = "lstm.layers.0.bias"


def test_module_finds_its_parameters():
    model = Model()
    assert [name for name, _ in model.named_parameters()] == NAMES
    assert model.n_parameters() == 7 * 8 + 4 * 2 * 64 + 4 * 2 * 64 + 64 + 16 + 16 + 16 * 7 + 7
    model.tied = model.head[2]
    assert len(model.parameters()) == len(NAMES)
    assert not model.eval().stages[1].training
    assert "Linear(BlockSparse(16 x 7" in repr(model)


def test_an_empty_dict_is_kept(tmp_path):
    state = {"activation": nn.ReLU().state_dict(), "more": {"none": {}, "one": 1}}
    ns.save(tmp_path / "state.npz", state)
    assert ns.load(tmp_path / "state.npz") == state


def test_lists_are_kept(tmp_path):
    """As lists, in order, ten and more of them, and whatever else a training keeps."""
    state = {
        "empty": [], "losses": [2.5 / (1 + i) for i in range(12)], "first": {"0": 1, "1": 2},
        "nested": [[], [[1], ()], {"deep": [{"x": [True, "a"]}]}], "best": None, "pair": (1, "b"),
        "generator": np.random.default_rng(0).bit_generator.state, "least": -(2**70),
        "texts": ["", "\0", "a\0", "a\0\0", "\0a", "a.\0"],
        "within": {"file": "x", "allow_pickle": 0},  # names that numpy.savez has for itself
    }  # fmt: skip
    ns.save(tmp_path / "state.npz", state)
    loaded = ns.load(tmp_path / "state.npz")
    assert (loaded, list(loaded)) == (state, list(state))
    assert type(loaded["nested"][2]["deep"][0]["x"][0]) is bool
    models = [nn.Linear(8, 4, block_size=4, seed=i).state_dict() for i in range(2)]
    ns.save(tmp_path / "state.npz", models)
    for own, got in zip(models, ns.load(tmp_path / "state.npz"), strict=True):
        assert (own["weight"].data == got["weight"].data).all()
    for nothing in ([], (), {}):
        ns.save(tmp_path / "state.npz", nothing)
        assert ns.load(tmp_path / "state.npz") == nothing
    ns.save(tmp_path / "state.npz", {"best": np.float32(0.1), "all": [np.bool_(True)]})
    assert ns.load(tmp_path / "state.npz") == {"best": float(np.float32(0.1)), "all": [True]}
    with pytest.raises(
        TypeError, match=r"state\['a/1'\] .* type is numbsparse\.Tensor: .*\.numpy\(\)"
    ):
        ns.save(tmp_path / "state.npz", {"a": [1, ns.Tensor([1.0])]})


def test_state_dict_round_trip(tmp_path, place):
    model, other = Model(0).to(place), Model(1)
    model.stages[1].calls = 5
    ns.save(
        tmp_path / "model.npz", {"model": model.state_dict(), "note": "ä", "step": 3, "lr": 0.5}
    )
    loaded = ns.load(tmp_path / "model.npz")
    assert (loaded["note"], loaded["step"], loaded["lr"]) == ("ä", 3, 0.5)
    other.load_state_dict(loaded["model"])
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(host(other.state_dict()[name]), host(value))
    other.lstm.layers[0].bias.data[:] = 7  # loaded values are the model's own
    assert not (loaded["model"]["lstm.layers.0.bias"] == 7).all()
    with np.load(tmp_path / "model.npz") as file:
        assert file["model/lstm.layers.0.bias"].shape == (64,)


@draws(20, "transposed weights of a state")
@given(st.integers(0, 2**20), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_weights_are_loaded_whichever_way_they_are_stored(seed, one, other, pickled, filed):
    """The values go to their places, whether the layer or the state has a transposed view."""
    rng = np.random.default_rng(seed)
    size, grid = int(rng.choice([1, 4])), tuple(int(n) for n in rng.integers(1, 5, 2))
    rows, columns = (int(n * size - rng.integers(size)) for n in grid)
    dense = rng.standard_normal((2, rows, columns)).astype(np.float32)
    pattern = rng.random(grid) < 0.6

    def holder(values, is_view):
        module = nn.Module()
        module.weight = nn.Parameter(stored(values, pattern, size, is_view))
        return module

    state, loading = holder(dense[0], one).state_dict(), holder(dense[1], other)
    if pickled:
        state = pickle.loads(pickle.dumps(state))
        assert state["weight"].is_transposed == one
    if filed:
        with TemporaryDirectory() as folder:
            ns.save(f"{folder}/state.npz", state)
            state = ns.load(f"{folder}/state.npz")
    before = loading.weight.data
    loading.load_state_dict(state)
    after = loading.weight.data
    kept = np.kron(pattern, np.ones((size, size)))[:rows, :columns]
    np.testing.assert_array_equal(after.toarray(), dense[0] * kept)
    assert (after.is_transposed, after.layout) == (other, before.layout)
    assert not after.n_blocks or not np.shares_memory(after.values, state["weight"].values)


def stored(dense, pattern, size, is_view):
    """The matrix, or a transposed view of one that is stored the other way."""
    if is_view:
        return ns.BlockSparse.from_dense(dense.T, pattern.T, block_size=size).T
    return ns.BlockSparse.from_dense(dense, pattern, block_size=size)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop(BIAS), r"lacks \['lstm.layers.0.bias'\]"),
        (lambda s: s.update(other=1), r"has \['other'\]"),
        (lambda s: s.update({BIAS: np.zeros(3, np.float32)}), BIAS),
        (lambda s: s.update({BIAS: np.zeros(64)}), "float64"),
        (lambda s: s.update({BIAS: 3}), "int"),
        (
            lambda s: s.update({"lstm.layers.0.weight_hh": np.zeros((16, 64), np.float32)}),
            "BlockSparse",
        ),
        (
            lambda s: s.update(
                {"lstm.layers.0.weight_hh": nn.LSTM(8, 16, block_size=8).layers[0].weight_hh.data}
            ),
            "layout",
        ),
    ],
    ids=["missing", "unknown", "shape", "dtype", "number", "dense", "layout"],
)
def test_a_state_of_another_model_changes_nothing(change, says):
    model = Model()
    before = model.state_dict()
    state = Model(1).state_dict()
    change(state)
    with pytest.raises(ValueError, match=says):
        model.load_state_dict(state)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(host(value), host(before[name]))


@pytest.mark.parametrize(
    "content", [b"", b"no npz", b"PK\x03\x04 cut off"], ids=["empty", "text", "cut"]
)
def test_load_refuses_what_is_no_checkpoint(tmp_path, content):
    (tmp_path / "file.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"file\.npz is not a checkpoint"):
        ns.load(tmp_path / "file.npz")


@pytest.mark.parametrize(
    "state",
    [
        {"a": object()}, {"a/b": 1}, {"": 1}, {1: 2}, {"a": [1, {2}]}, {"a\0": 1}, {"file": 1},
        {"allow_pickle": 1}, {"a": np.zeros(1, [("b", object)])}, {"a": np.ma.zeros(2)},
        {"a\udc80": 1}, {"a" * 65_001: 1}, {"a": {"é" * 32_500: 1}},
    ],
    ids=["an object", "a slash", "no name", "a number", "a set in a list", "a zero",
         "a name of savez's", "another", "objects within", "a mask",
         "no UTF-8", "a long key", "long ones"],
)  # fmt: skip
def test_save_refuses(tmp_path, state):
    with pytest.raises(TypeError, match="state"):
        ns.save(tmp_path / "file.npz", state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "state", [nn.Linear(4, 4, block_size=4), "state.npz", None, {1}], ids=type_name
)
def test_save_says_what_it_takes(tmp_path, state):
    got = type_name(state)
    says = rf"^state takes a dict or a list, such as model\.state_dict\(\), got {got}$"
    with pytest.raises(TypeError, match=says):
        ns.save(tmp_path / "file.npz", state)
    assert not list(tmp_path.iterdir())
