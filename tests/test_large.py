"""Arrays of more than 2^31 values, and very wide ones, on a real GPU: no offset may wrap."""

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.kernels.matmul import LADDER, RUNGS

pytestmark = pytest.mark.skipif(
    device.SIMULATED or not device.is_available(), reason="takes a GPU and 20 GB of its memory"
)

ROWS, WIDTH = 70_000, 32_768  # 2.3e9 values, 4.6 GB of float16; row 65536 begins at value 2^31
LOOK = np.array([0, 1, 65_535, 65_536, 65_537, ROWS - 1])  # the other rows are zero
ON_GPU = [name for name in RUNGS if RUNGS[name] == "cuda"]


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).standard_normal((len(LOOK), WIDTH)).astype(np.float16)


@pytest.fixture(scope="module")
def x(rows):
    """(ROWS, WIDTH), zero but for `rows` at LOOK."""
    array = zeros((ROWS, WIDTH))
    for row, values in zip(LOOK, rows, strict=True):
        ops.copy_into(array[int(row)], ns.to_device(values))
    yield array
    device.synchronize()


def block_size_of(name):
    return 16 if name == "k7_small_blocks" else 32


def wide(B):
    """A weight of WIDTH input features; its blocks meet the first, the middle and the last ones."""
    pattern = np.zeros((WIDTH // B, 2), bool)
    pattern[[0, WIDTH // B // 2, -1, -1], [0, 1, 0, 1]] = True
    return weight(pattern, B)


def tall(B):
    """A weight of ROWS input features; its blocks meet all rows of LOOK."""
    pattern = np.zeros((-(-ROWS // B), 2), bool)
    pattern[np.append(LOOK // B, 1000), [0, 1, 0, 0, 1, 1, 1]] = True
    return weight(pattern, B, shape=(ROWS, 2 * B))


def zeros(shape):
    try:
        return ops.zeros(shape, "float16", "cuda")
    except MemoryError as error:
        pytest.skip(str(error))


def weight(pattern, B, shape=None):
    values = np.random.default_rng(1).standard_normal((pattern.sum(), B, B)).astype(np.float16)
    return ns.BlockSparse(values, pattern, shape=shape).to("cuda")


def serving(name, product, batch):
    rung, B = LADDER[name], block_size_of(name)
    reason = rung.unsupported(product, B, np.dtype(np.float16), "cuda", batch)
    return pytest.skip(reason) if reason else rung


def assert_near(got, expected, terms=100):
    bound = 2.0**-11 * abs(expected) + terms * 2.0**-20
    assert (abs(got.astype(float) - expected) <= bound).all()


@pytest.mark.parametrize("name", ON_GPU)
def test_forward_and_weight_grad(name, x, rows):
    serving(name, "forward", ROWS)
    B = block_size_of(name)
    w = wide(B)
    y = ns.matmul(x, w, kernel=name).numpy()
    exact = rows.astype(float) @ w.toarray().astype(float)
    assert_near(y[LOOK], exact)
    assert not np.delete(y, LOOK, axis=0).any()
    serving(name, "weight_grad", ROWS)
    dy = np.zeros((ROWS, 2 * B), np.float16)
    dy[LOOK] = y[LOOK] / 8
    dw = ns.sddmm(x.T, ns.to_device(dy), w.layout, kernel=name)
    exact = rows.astype(float).T @ dy[LOOK].astype(float)
    kept = ns.BlockSparse.from_dense(exact, w.layout, block_size=B)
    assert_near(dw.data.numpy(), kept.data)


@pytest.mark.parametrize("name", ON_GPU)
def test_input_grad(name):
    serving(name, "input_grad", ROWS)
    B = block_size_of(name)
    w = wide(B)
    dy = np.zeros((ROWS, 2 * B), np.float16)
    dy[LOOK] = np.random.default_rng(2).standard_normal((len(LOOK), 2 * B))
    dx = ops.full_like(zeros((ROWS, WIDTH)), np.nan)
    ns.matmul(ns.to_device(dy), w.T, out=dx, kernel=name)
    exact = dy[LOOK].astype(float) @ w.toarray().T.astype(float)
    assert_near(np.stack([dx[int(row)].numpy() for row in LOOK]), exact)
    largest = ops.max(dx, axis=1).numpy()  # NaN where a value was not written
    assert not np.delete(largest, LOOK).any()
    assert (largest[LOOK] > 0).all()


@pytest.mark.parametrize("name", ON_GPU)
def test_feature_major(name, x, rows):
    serving(name, "input_grad", WIDTH)
    B = block_size_of(name)
    w = tall(B)
    exact = w.toarray()[LOOK].T.astype(float) @ rows.astype(float)
    out = ns.to_device(np.full((2 * B, WIDTH), np.nan, np.float16))
    assert_near(ns.matmul(w.T, x, out=out, kernel=name).numpy(), exact)
    serving(name, "forward", WIDTH)
    assert_near(ns.matmul(transposed(w), x, out=out, kernel=name).numpy(), exact)


@pytest.mark.parametrize("name", ON_GPU)
def test_feature_major_weight_grad(name, x, rows):
    serving(name, "weight_grad", WIDTH)
    B = block_size_of(name)
    w = tall(B)
    dy = np.random.default_rng(6).standard_normal((2 * B, WIDTH)).astype(np.float16) / 64
    dw = ns.sddmm(x, ns.to_device(dy).T, w.layout, block_size=B, kernel=name)
    exact = np.zeros((ROWS, 2 * B))
    exact[LOOK] = rows.astype(float) @ dy.T.astype(float)
    kept = ns.BlockSparse.from_dense(exact, w.layout, block_size=B)
    assert_near(dw.data.numpy(), kept.data, terms=1000)


@pytest.mark.parametrize("name", ON_GPU)
def test_weight_of_more_values(name):
    n, B = 46_400, block_size_of(name)
    at = 2**31 // B**2
    layout = ns.Layout(np.ones((n // B, n // B), bool))
    values = zeros((layout.n_blocks, B, B))
    b = np.array([0, at - 1, at, at + 1, layout.n_blocks - 1])
    rng = np.random.default_rng(3)
    blocks = rng.standard_normal((b.size, B, B)).astype(np.float16)
    for place, block in zip(b, blocks, strict=True):
        ops.copy_into(values[int(place)], ns.to_device(block))
    w = ns.BlockSparse(values, layout)
    x = rng.standard_normal((2, n)).astype(np.float16)
    starts = np.stack([layout.index.block_rows[b], layout.index.block_columns[b]], 1) * B
    forward, backward = np.zeros((2, n)), np.zeros((2, n))
    for block, (c, k) in zip(blocks.astype(float), starts, strict=True):
        forward[:, k : k + B] += x[:, c : c + B] @ block
        backward[:, c : c + B] += x[:, k : k + B] @ block.T
    on_device = ns.to_device(x)
    serving(name, "forward", 2)
    assert_near(ns.matmul(on_device, w, kernel=name).numpy(), forward)
    serving(name, "input_grad", 2)
    assert_near(ns.matmul(on_device, w.T, kernel=name).numpy(), backward)
    rung = serving(name, "weight_grad", 2)
    values = ops.full_like(values, np.nan)
    rung.weight_grad(on_device, on_device, ops.index_beside(layout, values), values)
    for place, (c, k) in zip(b, starts, strict=True):
        exact = x[:, c : c + B].T.astype(float) @ x[:, k : k + B].astype(float)
        assert_near(values[int(place)].numpy(), exact)
    assert not np.isnan(ops.max(values).numpy())


@pytest.mark.parametrize("size", [4, 16, 32])
@pytest.mark.parametrize("name", ON_GPU)
def test_a_wide_output(name, size):
    # More blocks of threads than a grid has along y.
    kept, columns = [0, 65_535, 300_000, 549_999], 550_000
    pattern = np.zeros((1, columns), bool)
    pattern[0, kept] = True
    values = np.random.default_rng(4).standard_normal((4, size, size)).astype(np.float16)
    x = np.random.default_rng(5).standard_normal((3, size)).astype(np.float16)
    exact = x.astype(float) @ np.hstack(values).astype(float)
    places = (np.array(kept)[:, None] * size + np.arange(size)).reshape(-1)
    w = ns.BlockSparse(values, pattern)
    for product, weight in (("forward", w), ("input_grad", transposed(w).T)):
        rung = LADDER[name]
        if rung.unsupported(product, size, np.dtype(np.float16), "cuda", 3) is None:
            y = ns.matmul(ns.to_device(x), weight.to("cuda"), kernel=name).numpy()
            assert_near(y[:, places], exact)
            assert not np.delete(y, places, axis=1).any()


def transposed(w):
    """The transposed matrix, its values stored in its own order."""
    return ns.BlockSparse(w.T.data, w.T.layout, shape=w.T.shape)


def test_values_by_themselves(x, rows):
    doubled = ops.multiply(x, 2.0)
    for row, values in zip(LOOK, rows, strict=True):
        np.testing.assert_array_equal(doubled[int(row)].numpy(), values * 2)
    taken = ops.take_rows(x, ns.to_device(LOOK)).numpy()
    np.testing.assert_array_equal(taken, rows)
    wide = ops.cast(x, "float32")
    np.testing.assert_array_equal(wide[ROWS - 1].numpy(), rows[-1].astype(np.float32))


def test_sums_and_rows(x, rows):
    exact = rows.astype(float)
    assert_near(ops.sum(x, axis=1).numpy()[LOOK], exact.sum(1), terms=2000)
    assert_near(ops.sum(x, axis=0).numpy(), exact.sum(0))
    np.testing.assert_array_equal(ops.max(x, axis=1).numpy()[LOOK], rows.max(1))
    y = ops.softmax(x)
    exact = np.exp(exact - exact.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    for row, expected in zip([*LOOK, 69_000], [*exact, np.full(WIDTH, 1 / WIDTH)], strict=True):
        assert_near(y[int(row)].numpy(), expected)
