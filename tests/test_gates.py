"""Gates: products and gradients against float64, what is skipped, remembered and refused."""

import numpy as np
import pytest
from conftest import HALVES, host
from drawn import Space
from gate_helpers import close, pattern, spread

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.dtypes import as_dtype
from numbsparse.nn import functional as F


def scaled(w, gate):
    return F.scale_blocks(w, gate).data


CASES = Space(
    {
        "call": ["x @ w", "x @ w.T", "w @ x", "w.T @ x"],
        "gates": ["some zero", "all", "none", "one", "ones", "zeros and ones"],
        "kind": ["array", "matrix", "matrix stored otherwise"],
        "stored": ["as it is", "transposed"],
        "edge": [(0, 0), (1, 3)],
        "dtype": ["float32", "float64", *HALVES],
        "place": ["cpu", "cuda"],
        "block_size": [4, 8, 16],
        "batch": [1, 9],
    },
    lambda case: (
        (case.get("place"), case.get("dtype")) != ("cuda", "float64")
        and not (case.get("place") == "cpu" and case.get("dtype") in HALVES)
    ),
).covering()


def gates_of(kind, n, dtype="float32"):
    gates = np.array([-1.5, 0.0, 0.75, -0.0][:n])
    one, both = [0, 0, 1.25][:n], [1, 0, 1][:n]
    given = {"all": 2.25, "none": 0, "one": one, "ones": 1, "zeros and ones": both}
    gates[:] = given.get(kind, gates)
    return gates.astype("float64" if dtype == "float64" else "float32")


def matrix_of(case, rng):
    """A matrix; what is beyond its edge is NaN."""
    size, kept = case["block_size"], pattern()[:, ::-1]  # other orders by row and column
    full = [n * size for n in kept.shape]
    shape = tuple(n - cut for n, cut in zip(full, case["edge"], strict=True))
    dense = np.full(full, np.nan)
    dense[: shape[0], : shape[1]] = rng.standard_normal(shape)
    w = ns.BlockSparse.from_dense(dense.astype(as_dtype(case["dtype"])), kept, block_size=size)
    w = ns.BlockSparse(w.data, w.layout, shape=shape)
    if case["stored"] == "transposed":
        w = ns.BlockSparse(w.T.data, w.layout.T, shape=shape[::-1]).T
    return w


def per_block(dense, w):
    """Sums over each block of a dense matrix."""
    blocks = ns.BlockSparse.from_dense(dense, w.layout, block_size=w.block_size)
    return blocks.data.sum((1, 2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_gated_product_and_its_gradients(case, rng):
    if case["place"] == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    own = matrix_of(case, rng)
    w = own.T if "w.T" in case["call"] else own
    first = case["call"].endswith("@ x")
    gates = gates_of(case["gates"], w.n_blocks, case["dtype"])
    wide, dense = spread(gates, w), host(w).astype(np.float64)
    put = ns.to_device if case["place"] == "cuda" else np.asarray
    shape = (w.shape[1], case["batch"]) if first else (case["batch"], w.shape[0])
    dtype = as_dtype(case["dtype"])
    x = rng.standard_normal(shape).astype(dtype)
    dy = rng.standard_normal((w.shape[0], case["batch"]) if first else (case["batch"], w.shape[1]))
    dy = dy.astype(dtype)
    given = put(gates)
    if case["kind"] != "array":
        given = ns.BlockSparse(gates.reshape(-1, 1, 1), w.layout)
        if w.is_transposed != ("otherwise" in case["kind"]):
            given = ns.BlockSparse(given.T.data, given.layout.T).T
        given = given.to(case["place"])
    tensors = [ns.Tensor(a, requires_grad=True) for a in (put(x), w.to(case["place"]), given)]
    tx, tw, tg = tensors
    one, two = (tw, tx) if first else (tx, tw)
    y = ns.matmul(one, two, gate=tg)
    y.backward(put(dy))
    plain = ns.matmul(one.data, two.data, gate=given)
    np.testing.assert_array_equal(host(plain), host(y.data))
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    gated, sizes = dense * wide, abs(dense * wide)
    skipped = wide != 0
    if first:
        right, of_y = gated @ x, sizes @ abs(x)
        dx, of_dx = gated.T @ dy, sizes.T @ abs(dy)
        dw, of_dw = dy @ x.T, abs(dy) @ abs(x).T
    else:
        right, of_y = x @ gated, abs(x) @ sizes
        dx, of_dx = dy @ gated.T, abs(dy) @ sizes.T
        dw, of_dw = x.T @ dy, abs(x).T @ abs(dy)
    n = max(w.shape) + case["batch"]
    close(y.data, right, of_y, case["dtype"], n)
    close(tx.grad.data, dx, of_dx, case["dtype"], n)
    assert tw.grad.data.layout == w.layout
    close(tw.grad.data, dw * wide, of_dw * abs(wide), case["dtype"], n)
    found = tg.grad.data
    if case["kind"] != "array":
        assert found.layout == given.layout
        assert found.is_transposed == given.is_transposed
        found = host(found.data).reshape(-1)
    right, size = (per_block(a * skipped, w) for a in (dw * dense, of_dw * abs(dense)))
    close(found, right, size, case["dtype"], n + w.block_size**2)
    assert (host(found)[gates == 0] == 0).all()


@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
def test_gradients_of_gradients(rng, turned):
    w = ns.BlockSparse(rng.standard_normal((4, 4, 4)), [[1, 1, 0], [0, 1, 1]], shape=(8, 11))
    w = w.T if turned else w
    x = rng.standard_normal((3, w.shape[0]))

    def product(x, w, gate):
        return ns.matmul(x, w, gate=gate)

    def with_zeros(x, w, gate):  # whose gates stay zero, wherever the others move
        return ns.matmul(x, w, gate=gate * np.array([1.0, 0, 1, 0]))

    gates = rng.standard_normal(4)
    ns.testing.check_grads(product, x, w, gates, order=2)
    ns.testing.check_grads(with_zeros, x, w, gates, order=2)


def test_what_is_skipped_is_not_read(rng, place, put):
    w = ns.BlockSparse(rng.standard_normal((3, 4, 4)).astype(np.float32), pattern())
    w.values[1] = np.nan
    x = rng.standard_normal((2, 8)).astype(np.float32)
    gates = np.float32([1, 0, 2])
    tw = ns.Tensor(put(w), requires_grad=True)
    tg = ns.Tensor(put(gates), requires_grad=True)
    y = ns.matmul(put(x), tw, gate=tg)
    y.backward(put(np.ones((2, 12), np.float32)))
    right = x @ ns.BlockSparse(np.nan_to_num(w.data) * gates[:, None, None], pattern()).toarray()
    np.testing.assert_allclose(host(y.data), right, rtol=1e-5)
    assert np.isfinite(host(tg.grad.data)).all()
    assert np.isnan(host(ns.matmul(put(x), put(w), gate=put(np.float32([1, 1, 2]))))).any()
    strange = host(ns.matmul(put(x), put(w), gate=put(np.float32([np.nan, 0, 2]))))
    assert np.isnan(strange[:, :4]).all()
    assert np.isfinite(strange[:, 4:]).all()


def test_what_gradients_hold_beyond_the_edge_is_not_read(rng, put):
    values = rng.standard_normal((3, 4, 4)).astype(np.float32)
    w = put(ns.BlockSparse(values, pattern(), shape=(7, 12)))
    gate = ns.Tensor(put(np.ones(3, np.float32)), requires_grad=True)
    gated = F.scale_blocks(ns.Tensor(w), gate)
    beyond = values.copy()
    beyond[2, 3] = np.nan
    gated.backward(put(ns.BlockSparse(beyond, pattern(), shape=(7, 12))))
    right = (values**2).sum((1, 2)) - [0, 0, (values[2, 3] ** 2).sum()]
    np.testing.assert_allclose(host(gate.grad.data), right, rtol=1e-5)


def test_a_set_of_zeros_costs_a_layout_once(place, put, monkeypatch):
    monkeypatch.setattr(ops.gates, "MOST_SELECTIONS", 4)
    w = put(ns.BlockSparse(np.ones((3, 4, 4), np.float32), pattern()))
    gates = [np.float32([1, 0, 2]), np.float32([3, 0, -1]), np.float32([1, 1, 0])]
    one, two, other = (scaled(w, put(g)).layout for g in gates)
    assert one is two
    assert one is not other
    assert one.n_blocks == other.n_blocks == 2
    assert scaled(w, put(np.ones(3, np.float32))) is w
    assert scaled(w, put(np.float32([1, 2, 1]))).layout is w.layout
    for zeros in ([0, 0, 1], [0, 1, 0], [1, 0, 0]):
        scaled(w, put(np.float32(zeros)))
    assert scaled(w, put(gates[2])).layout is other  # the last four
    assert scaled(w, put(gates[0])).layout is not one


@pytest.mark.simulator
def test_gates_on_a_gpu_are_copied_once(monkeypatch):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    w = ns.BlockSparse(np.ones((3, 4, 4), np.float32), pattern()).to("cuda")
    gate, copies = ns.to_device(np.float32([1, 0, 2])), []
    copy = ns.DeviceArray.numpy
    monkeypatch.setattr(ns.DeviceArray, "numpy", lambda a: copies.append(a.shape) or copy(a))
    layouts = {id(scaled(w, gate).layout) for _ in range(3)}
    assert (copies, len(layouts)) == ([(3,)], 1)
    ops.copy_into(gate, ns.to_device(np.float32([1, 1, 0])))
    changed = scaled(w, gate)
    assert len(copies) == 2
    np.testing.assert_array_equal(changed.layout.pattern, [[1, 1, 0], [0, 0, 0]])
    both = ns.to_device(np.float32([1, 0, 2, 0, 0, 3]))
    assert [scaled(w, part).n_blocks for part in (both[:3], both[3:])] == [2, 1]
    monkeypatch.setattr(ops.gates, "is_own", lambda a: False)  # as of another library, then
    for before in (len(copies), len(copies) + 1):
        scaled(w, gate)
        assert len(copies) == before + 1


def test_what_is_no_gate_is_refused(place, put):
    w = put(ns.BlockSparse(np.ones((3, 4, 4), np.float32), pattern()))
    x = put(np.ones((2, 8), np.float32))

    def refused(kind, words, gate):
        for given in (gate, ns.Tensor(gate)):
            with pytest.raises(kind, match=words):
                ns.matmul(x, w, gate=given)

    ones = np.ones((3, 1, 1), np.float32)
    refused(ValueError, r"gate takes the shape \(3,\), a .*, got \(4,\)", put(np.ones(4, "f4")))
    refused(ValueError, r"got \(3, 1\)", put(np.ones((3, 1), np.float32)))
    refused(TypeError, "gate takes float32 with a w of float32, got int64", put(np.ones(3, int)))
    other = put(ns.BlockSparse(ones, [[1, 1, 1], [0, 0, 0]]))
    refused(ValueError, "gate takes blocks of 1 x 1 in the layout of w", other)
    refused(ValueError, "gate takes blocks of 1 x 1", w)
    with pytest.raises(
        ValueError, match=r"gate takes the shape \(3,\), a number for each .*\(4,\)"
    ):
        F.scale_blocks(ns.Tensor(w), put(np.ones(4, np.float32)))
    if place == "cpu":
        refused(TypeError, "got float64", np.ones(3))
        wide = ns.BlockSparse(np.ones((3, 4, 4)), pattern())
        with pytest.raises(TypeError, match="gate takes float64 with a w of float64, got float32"):
            ns.matmul(np.ones((2, 8)), wide, gate=np.ones(3, np.float32))
        with pytest.raises(TypeError, match="w takes a Tensor of a BlockSparse, got one of"):
            F.scale_blocks(ns.Tensor(np.ones(3)), np.ones(3))
    else:
        refused(ValueError, "gate takes the device of w, cuda", np.ones(3, np.float32))


def test_a_result_may_have_its_array(place, put):
    w = put(ns.BlockSparse(np.ones((3, 4, 4), np.float32), pattern()))
    x, out = put(np.ones((2, 8), np.float32)), put(np.full((2, 12), np.nan, np.float32))
    assert ns.matmul(x, w, gate=put(np.float32([2, 0, 1])), out=out) is out
    np.testing.assert_array_equal(host(out)[0], [8] * 4 + [0] * 4 + [4] * 4)


def test_a_layer_trains_its_gates_and_they_follow_its_weight(place):
    layer = nn.Linear(8, 12, layout=pattern(), block_size=4, gate=True, seed=0).to(place)
    plain = nn.Linear(8, 12, layout=pattern(), block_size=4, seed=0).to(place)
    assert "gate=True" in repr(layer)
    assert "gate" not in repr(plain)
    assert layer.n_parameters() == plain.n_parameters() + 3
    optimizer = nn.optim.Adam(layer.parameters(), lr=0.1)
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    x = ns.to_device(x) if place == "cuda" else x
    np.testing.assert_array_equal(host(layer(x).data), host(plain(x).data))
    F.sum(layer(x)).backward()
    optimizer.step()
    gates = host(layer.gate.data.data).reshape(-1)
    assert (gates != 1).all()
    norms = host(layer.weight.data.block_norms()) * abs(gates)
    moments = optimizer.state_dict()["2.m"].data
    gone = norms.argmin()
    nn.utils.prune(layer, threshold=np.sort(norms)[1] * 0.99, remap=optimizer)
    kept = np.delete(np.arange(3), gone)
    np.testing.assert_array_equal(host(layer.gate.data.data).reshape(-1), gates[kept])
    assert layer.gate.data.layout == layer.weight.data.layout
    np.testing.assert_array_equal(optimizer.state_dict()["2.m"].data, moments[kept])
    F.sum(layer(x)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"model\[2\] is a gate, which follows its weight"):
        nn.utils.prune(layer.parameters(), 0.1)


def test_of_equal_blocks_the_one_with_the_smaller_gate_goes():
    layer = nn.Linear(8, 12, layout=pattern(), block_size=4, gate=True)
    layer.weight.data.values[:] = 1
    layer.gate.data.values[:, 0, 0] = [-3, 1, 2]
    nn.utils.prune(layer, 2 / 6)
    np.testing.assert_array_equal(layer.gate.data.values[:, 0, 0], [-3, 2])


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("size", [4, 8, 32])
def test_blocks_are_multiplied_in_place(dtype, size, rng):
    """Zeros where a gate is zero, whatever was there; else as any number, infinity and NaN too."""
    gates = np.float32([1, 0, -2.5, np.nan, 0, 1, 0.5])
    values = rng.standard_normal((gates.size, size, size)).astype(as_dtype(dtype))
    values[0, 0, 0], values[1, 0, 0], values[4, -1, -1], values[6, 0, 1] = (
        np.nan,
        np.nan,
        np.inf,
        np.inf,
    )
    by, there = ns.to_device(gates), ns.to_device(values)
    where = ns.to_device(np.arange(gates.size, dtype=np.int32))
    ops.gates.kernels.gates.scale_blocks(there, where, by, by, 1, there)
    factors = gates[:, None, None]
    with np.errstate(invalid="ignore"):
        right = np.where(factors == 0, 0, values.astype(np.float32) * factors).astype(values.dtype)
    np.testing.assert_array_equal(there.numpy().astype(float), right.astype(float))
