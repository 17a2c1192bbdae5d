"""`.safetensors` files: nothing is lost, others read them, and damage is refused."""

import json

import numpy as np
import pytest
from conftest import HAS_BFLOAT16
from drawn import DRAWS, SEED
from npz_helpers import STATE, refused, same
from test_drawn_files import damaged, named

import numbsparse as ns
from numbsparse import nn
from numbsparse.dtypes import as_dtype

package = pytest.importorskip("safetensors", reason="safetensors is not installed")
others = pytest.importorskip("safetensors.numpy")

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", *["bfloat16"] * HAS_BFLOAT16),
]


def matrix(rng, dtype="float32"):
    """One with an empty block row, that ends within its last blocks, maybe a transposed view."""
    layout = ns.Layout(rng.random((3, 4)) < [[0.7], [0], [0.4]])
    values = rng.standard_normal((layout.n_blocks, 4, 4)).astype(as_dtype(dtype))
    w = ns.BlockSparse(values, layout, shape=(int(rng.integers(9, 13)), int(rng.integers(13, 17))))
    return w.T if rng.random() < 0.5 else w


def array(rng, dtype):
    """Of any order and any sizes, none and zero among them."""
    shape = tuple(rng.integers(0, 4, rng.integers(0, 4)))
    items = rng.integers(0, 256, (*shape, as_dtype(dtype).itemsize), np.uint8)
    items = items % 2 if dtype == "bool" else items
    a = items.view(as_dtype(dtype))[..., 0]
    return a.T if rng.random() < 0.5 else a


def drawn_state(rng, depth=0):
    """A dict of all that a file takes."""
    kinds = [
        lambda: array(rng, rng.choice(DTYPES)),
        lambda: matrix(rng, rng.choice([d for d in DTYPES if "float" in d])),
        lambda: int(rng.integers(-(2**62), 2**62)) * int(rng.choice([1, 2**40])),
        lambda: float(rng.choice([0.1, 1e300, -0.0, np.inf, np.nan])),
        lambda: str(rng.choice(["", "ä \u2028", '"\\', "\ud800"])),
        lambda: str(rng.choice(["a", "", "\0b", "ä"])) + "\0" * int(rng.integers(3)),
        lambda: bool(rng.random() < 0.5),
        lambda: None,
        lambda: drawn_state(rng, depth + 1),
        lambda: list(drawn_state(rng, depth + 1).values()),
        lambda: tuple(drawn_state(rng, depth + 1).values()),
    ]
    names = rng.permutation(["a", "b.c", "ä", "file.x", "_pattern", "metadata", "7"])
    return {
        str(name): kinds[rng.integers(len(kinds) - 3 * (depth > 2))]()
        for name in names[: rng.integers(0, 6)]
    }


def as_loaded(value):
    """Arrays without axes come back as numbers."""
    if isinstance(value, dict):
        return {key: as_loaded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(as_loaded, value))
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    return ns.BlockSparse(value.data, value.layout, shape=value.shape) if is_view(value) else value


def is_view(value):
    return isinstance(value, ns.BlockSparse) and value.is_transposed


@pytest.mark.parametrize(("ending", "draws"), [("safetensors", 70), ("npz", 30)])
def test_drawn_states_come_back(tmp_path, ending, draws):
    path = tmp_path / f"state.{ending}"
    for draw in range(draws * DRAWS):
        rng = np.random.default_rng([SEED, draw])
        state = drawn_state(rng)
        with named(draw):
            ns.save(path, state)
            loaded = ns.load(path)
            same(loaded, as_loaded(state))
            for a, b in zip(leaves(loaded), leaves(as_loaded(state)), strict=True):
                assert a.dtype == b.dtype
                assert a.tobytes() == b.tobytes()  # NaN and -0.0 too
                a[...] = 0  # ours to write to


def leaves(value):
    """The arrays within."""
    if isinstance(value, dict | list | tuple):
        inside = value.values() if isinstance(value, dict) else value
        return [leaf for inner in inside for leaf in leaves(inner)]
    if isinstance(value, ns.BlockSparse):
        return [value.values]
    return [value] if isinstance(value, np.ndarray) else []


def test_others_see_the_tensors(tmp_path):
    """What a dense layer has is under its name; a sparse weight is its blocks and its pattern."""
    model = nn.Linear(10, 16, layout=[[1, 0], [1, 1]], block_size=8, seed=0)
    ns.save(tmp_path / "model.safetensors", model.state_dict())
    seen = others.load_file(tmp_path / "model.safetensors")
    weight = model.weight.data
    expected = {
        "bias": model.bias.numpy(), "weight": weight.data, "weight_pattern": weight.layout.pattern
    }  # fmt: skip
    assert seen.keys() == expected.keys()
    for name, right in expected.items():
        assert seen[name].dtype == right.dtype
        np.testing.assert_array_equal(seen[name], right)


def test_what_is_no_array_is_no_tensor(tmp_path):
    ns.save(tmp_path / "state.safetensors", STATE)
    arrays = ["lists/1/0/left", "model/bias", "model/weight", "model/weight_pattern"]
    assert sorted(others.load_file(tmp_path / "state.safetensors")) == arrays


def test_a_file_of_others_is_read(tmp_path, rng):
    path = tmp_path / "theirs.safetensors"
    blocks = rng.standard_normal((3, 4, 4), np.float32)
    pattern = np.array([[1, 0], [1, 1]], bool)
    theirs = {
        **{"w": blocks, "w_pattern": pattern, "a/b": np.arange(3), "steps": np.array(5)},
        # Not those of a matrix:
        **{"mask": blocks, "mask_pattern": ~pattern, "v": blocks, "v_pattern": np.ones(3, bool)},
        **{"i": blocks.astype(int), "i_pattern": pattern, "lone_pattern": pattern},
        **{"flat": blocks[:, :, :2].copy(), "flat_pattern": pattern},
        **{"line": blocks[:, 0, 0].copy(), "line_pattern": pattern},
        **{"points": blocks[:, :0, :0].copy(), "points_pattern": pattern},
        **{"none": blocks[:0], "none_pattern": pattern[:0]},
        **{"empty": blocks[:0], "empty_pattern": np.zeros((2, 3), bool)},
    }
    others.save_file(theirs, path, {"format": "np"})
    loaded = ns.load(path)
    w = loaded.pop("w")
    same(w, ns.BlockSparse(blocks, pattern))
    same(loaded.pop("empty"), ns.BlockSparse(blocks[:0], np.zeros((2, 3))))
    assert loaded.pop("steps") == 5
    taken = ["w", "w_pattern", "steps", "empty", "empty_pattern"]
    kept = {name: a for name, a in theirs.items() if name not in taken}
    same(dict(sorted(loaded.items())), dict(sorted(kept.items())))


def test_a_resumed_model(tmp_path):
    """Layers whose edges are within blocks, numbers, and the states of optimizers."""

    def make(seed):
        layers = nn.Linear(10, 12, block_size=8, seed=seed), nn.Dropout(0.5), nn.BatchNorm(12)
        model = nn.Sequential(*layers, nn.LSTM(12, 16, block_size=8, seed=seed))
        return model, nn.optim.Adam(model.parameters(), lr=0.1)

    (one, optimizer), (other, its) = make(0), make(1)
    for parameter in one.parameters():
        parameter.grad = ns.Tensor(parameter.data)
    optimizer.step()
    path = tmp_path / "checkpoint.safetensors"
    state = {"model": one.state_dict(), "optimizer": optimizer.state_dict()}
    ns.save(path, state)
    loaded = ns.load(path)
    other.load_state_dict(loaded["model"])
    its.load_state_dict(loaded["optimizer"])
    same(other.state_dict(), one.state_dict())
    same(its.state_dict(), optimizer.state_dict())


def test_the_same_state_is_the_same_bytes(tmp_path):
    paths = [tmp_path / f"{i}.safetensors" for i in range(8)]
    for path in paths:
        ns.save(path, STATE)
    assert len({path.read_bytes() for path in paths}) == 1


def test_drawn_damage(tmp_path):
    path = tmp_path / "state.safetensors"
    ns.save(path, STATE)
    content = path.read_bytes()
    for draw in range(300 * DRAWS):
        rng = np.random.default_rng([SEED, 2, draw])
        with named(draw):
            loaded, error = refused(ns.load, path, damaged(rng, content))
            if error is None:
                same(loaded, STATE)


@pytest.mark.parametrize(
    ("before", "after"), [(b"[2,3]", b"[3,2]"), (b'"I64"', b'"U64"'), (b'"a":{', b'"b":{')]
)
def test_what_a_tensor_is_said_to_be_is_watched(tmp_path, before, after):
    path = tmp_path / "state.safetensors"
    ns.save(path, {"a": np.zeros((2, 3), int)})
    changed = path.read_bytes().replace(before, after)
    _, error = refused(ns.load, path, changed)
    assert "its checksum is that of other contents" in str(error)


@pytest.mark.parametrize("dtype", [">i4", ">f8", ">u2"])
def test_numbers_of_another_byte_order(tmp_path, dtype):
    ns.save(tmp_path / "state.safetensors", {"a": np.arange(5).astype(dtype)})
    loaded = ns.load(tmp_path / "state.safetensors")["a"]
    assert loaded.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(loaded, np.arange(5))


@pytest.mark.parametrize("key", ["numbsparse", "crc32", "model/weight", "tensor", "matrix", "12]"])
def test_each_byte_of_the_metadata_is_watched(tmp_path, key):
    path = tmp_path / "state.safetensors"
    ns.save(path, STATE)
    content = path.read_bytes()
    at = content.index(key.encode())
    for i in range(at, at + len(key)):
        for letter in b"x0":
            changed = bytes([*content[:i], letter, *content[i + 1 :]])
            loaded, error = refused(ns.load, path, changed)
            if error is None:
                same(loaded, STATE)


def stored(code, shape, items, metadata=None):
    """A file of one tensor, "a"."""
    says = {"dtype": code, "shape": shape, "data_offsets": [0, len(items)]}
    header = json.dumps({"a": says, **({"__metadata__": metadata} if metadata else {})}).encode()
    return len(header).to_bytes(8, "little") + header + items


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a checkpoint"),
        (b"PK\3\4 is a zip", "not a checkpoint"),
        (stored("F32", [2], bytes(4)), "not a checkpoint"),
        (stored("F32", [1 << 40], bytes(4)), "not a checkpoint"),
        (stored("F8_E4M3", [2], bytes(2)), "'a' holds F8_E4M3, which NumPy lacks"),
        (stored("BOOL", [2], b"\1\2"), "booleans that are neither 0 nor 1"),
        (stored("U8", [2], b"\1\2", {"numbsparse": "{}"}), "checksum"),
    ],
)
def test_refused(tmp_path, content, says):
    _, error = refused(ns.load, tmp_path / "a.safetensors", content)
    assert says in str(error)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": np.zeros(2, complex)}, r"state\['a'\] cannot be saved.*no complex128: use .npz"),
        ({"a": [np.array(["x"])]}, r"state\['a/0'\].*no <U1"),
        ({"__metadata__": np.zeros(2)}, "two things that a file calls '__metadata__'"),
        ({"w": STATE["model"]["weight"], "w_pattern": np.zeros(2)}, "calls 'w_pattern'"),
        ({"w_pattern": np.zeros(2), "w": STATE["model"]["weight"]}, "calls 'w_pattern'"),
        ({"a": [np.complex64(1)]}, r"state\['a/0'\].*no complex64"),
        ({"a": object()}, r"state\['a'\] cannot be saved: its type is object"),
    ],
)
def test_what_a_file_does_not_take(tmp_path, state, says):
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(TypeError, match=says):
        ns.save(path, state)
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize("order", [list, reversed])
def test_a_name_may_end_as_a_pattern_does(tmp_path, order):
    path = tmp_path / "state.safetensors"
    state = {"v": np.zeros((1, 4, 4)), "v_pattern": np.ones((1, 1), bool)}
    ns.save(path, dict(order(state.items())))
    same(ns.load(path)["v_pattern"], state["v_pattern"])
    same(ns.load(path)["v"], state["v"])
