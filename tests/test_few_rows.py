"""On the CPU a few rows are multiplied otherwise than many, to the same numbers bit by bit."""

import numpy as np
import pytest
from drawn import takes_few
from few_rows_helpers import FEW_ROWS

import numbsparse as ns
from numbsparse.kernels.matmul.k0_cpu import few_rows, lines

KERNELS = [(*of, size) for of, sizes in FEW_ROWS.items() for size in sizes]


def matrix(rng, layout, size, dtype, shape):
    values = rng.standard_normal((layout.n_blocks, size, size)).astype(dtype)
    return ns.BlockSparse(values, layout, shape=shape)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "rows", "size"), KERNELS)
def test_few_rows_are_those_of_many(rng, monkeypatch, dtype, rows, size, transposed):
    layout = ns.Layout(ns.patterns.random(5, 4, 0.5, seed=size))
    w = matrix(rng, layout, size, dtype, (5 * size - 3, 4 * size - 1))
    w = w.T if transposed else w
    x = rng.standard_normal((192, w.shape[0])).astype(dtype)
    with monkeypatch.context() as packed:
        packed.setattr(lines, "pays", lambda *of: False)
        many = ns.matmul(x, w)
    taken = []
    made = few_rows.few_product
    monkeypatch.setattr(
        lines,
        "few_product",
        lambda *of: lambda *arrays: (taken.append(of), made(*of)(*arrays)),
    )
    monkeypatch.setattr(lines, "pays", lambda *of: True)
    some = *range(1, 20), 37, 64
    batches = [batch for batch in some if few_rows.rows_at_once(size, batch) == rows]
    for batch in batches:
        for some in (x, np.asfortranarray(x), x[::-3]):
            right = many[::-3] if some.strides[0] < 0 else many
            out = np.full((batch, w.shape[1]), np.nan, dtype)
            ns.matmul(some[:batch], w, out=out)
            np.testing.assert_array_equal(out, right[:batch])
        across = np.full((w.shape[1], batch), np.nan, dtype)
        ns.matmul(w.T, np.ascontiguousarray(x[:batch].T), out=across)
        np.testing.assert_array_equal(across.T, many[:batch])
    assert len(taken) == 4 * len(batches)


@pytest.mark.parametrize(
    ("size", "transposed", "a_line", "batch", "pays"),
    [
        *((size, False, 16, 1, True) for size in (4, 8, 16, 32)),
        (8, False, 16, 64, False),  # its steps are too few
        (8, False, 1, 33, True),  # more is packed than multiplied
        (8, False, 1, 129, False),
        (32, False, 3, 33, True),  # a vector of 16 rows would be two empty thirds
        (32, False, 3, 513, False),
        (128, False, 6, 15, True),
        (128, True, 6, 15, False),  # blocks are transposed
        (32, False, 3, 0, False),
    ],
)
def test_few_rows_are_those_that_are_quicker_so(size, transposed, a_line, batch, pays):
    values, features = np.empty((a_line * 1024 // size, size, size), np.float32), 1024
    assert few_rows.pays(batch, values, features, transposed) is pays


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize(("size", "transposed", "rows"), [(4, False, 1), (16, True, 4)])
def test_strips_of_lines_are_shared_out(rng, monkeypatch, size, transposed, rows, cores):
    """Of any number of cores, with more strips than block columns, empty ones and a ragged edge."""
    monkeypatch.setattr(few_rows, "cores_for", lambda multiply_adds: cores)
    monkeypatch.setattr(few_rows, "WORTH", 1 << 40)
    monkeypatch.setattr(few_rows, "rows_at_once", lambda size, batch: rows)
    for columns in (1, 5, 40):
        pattern = ns.patterns.random(7, columns, 0.4, seed=columns)
        pattern[3], pattern[:, columns // 2] = False, False
        layout, shape = ns.Layout(pattern), (7 * size - 2, size * columns - 3)
        if transposed:
            w = matrix(rng, layout.T, size, np.float32, shape[::-1]).T
        else:
            w = matrix(rng, layout, size, np.float32, shape)
        x = rng.standard_normal((40, shape[0])).astype(np.float32)
        monkeypatch.setattr(lines, "pays", lambda *of: False)
        many = ns.matmul(x, w)
        monkeypatch.setattr(lines, "pays", lambda *of: True)
        for batch in (rows, rows + 2, 12):
            out = np.full((batch, w.shape[1]), np.nan, np.float32)
            ns.matmul(x[:batch], w, out=out)
            np.testing.assert_array_equal(out, many[:batch])


@pytest.mark.parametrize("slab", [lines.SLAB, 1], ids=["one slab", "a slab for each panel"])
def test_the_last_rows_of_a_batch_follow_as_few(rng, monkeypatch, slab):
    monkeypatch.setattr(lines, "SLAB", slab)
    monkeypatch.setattr(lines, "pays", takes_few)
    w = matrix(rng, ns.Layout(ns.patterns.random(5, 4, 0.5, seed=0)), 8, np.float32, (38, 31))
    x = rng.standard_normal((200, 38)).astype(np.float32)
    for rows, v in ((x, w), (rng.standard_normal((200, 31)).astype(np.float32), w.T)):
        many = ns.matmul(rows, v)
        for batch in (34, 47, 67, 96, 130):
            out = np.full((batch, v.shape[1]), np.nan, np.float32)
            ns.matmul(rows[:batch], v, out=out)
            np.testing.assert_array_equal(out, many[:batch])


def test_an_empty_batch_and_empty_lines():
    layout = ns.Layout(np.array([[1, 0], [0, 0]], bool))
    w = ns.BlockSparse(np.ones((1, 8, 8), np.float32), layout)
    assert ns.matmul(np.ones((0, 16), np.float32), w).shape == (0, 16)
    y = ns.matmul(np.ones((1, 16), np.float32), w)
    np.testing.assert_array_equal(y, [[8.0] * 8 + [0.0] * 8])
    np.testing.assert_array_equal(ns.matmul(np.ones((1, 16), np.float32), w.T), y)


def test_infinity_beyond_the_edge_is_not_read():
    layout = ns.Layout(np.ones((1, 1), bool))
    values = np.full((1, 8, 8), np.inf, np.float32)
    values[0, :5, :6] = 1
    w = ns.BlockSparse(values, layout, shape=(5, 6))
    np.testing.assert_array_equal(ns.matmul(np.ones((2, 5), np.float32), w), np.full((2, 6), 5.0))
    np.testing.assert_array_equal(ns.matmul(np.ones((2, 6), np.float32), w.T), np.full((2, 5), 6.0))


@pytest.mark.parametrize("batch", [1, 24])
def test_a_product_of_known_shapes_reads_what_is_there_now(rng, batch):
    w = matrix(rng, ns.Layout(ns.patterns.random(4, 4, 0.5, seed=0)), 4, np.float32, (14, 14))
    x = rng.standard_normal((batch, 14)).astype(np.float32)
    packed = np.zeros(batch, "i1, (14,)f4")["f1"]  # rows begin at odd addresses

    def check(x, w):
        exact = x.astype(np.float64) @ w.toarray().astype(np.float64)
        for _ in range(2):
            y = x @ w
            np.testing.assert_allclose(y, exact, rtol=0, atol=1e-4)
            assert (y.dtype, y.shape) == (x.dtype, exact.shape)

    check(x, w)
    x[...], w.data[...] = 1 - x, 1 - w.data
    packed[...] = x
    check(x, w)
    check(x.astype(np.float64), w.astype(np.float64))
    for other in (packed, np.asfortranarray(x), x[::-1], x[0], x[None], x[None, :0]):
        check(other, w)
    for other in (np.ascontiguousarray(x.T), x.T, packed.T, x[::-1].T, x[0], x[:0].T):
        for of in (w, w.T):
            exact = of.toarray().astype(np.float64) @ other.astype(np.float64)
            for _ in range(2):
                y = of @ other
                np.testing.assert_allclose(y, exact, rtol=0, atol=1e-4)
                assert (y.shape, y.flags.c_contiguous) == (exact.shape, True)
    check(x[:1], w.with_values(np.asfortranarray(w.values[::-1])))
    check(x, w.T)
    check(x, matrix(rng, ns.Layout(ns.patterns.random(4, 4, 0.5, seed=1)), 4, np.float32, (14, 14)))
    for wrong, error in ((x.astype(np.float64), TypeError), (x[:, :13], ValueError)):
        with pytest.raises(error, match=r"x takes|x and w take"):
            wrong @ w
    for how in ({"kernel": "k9"}, {"precision": "low"}):
        with pytest.raises(ValueError, match="takes"):
            ns.matmul(x, w, **how)
    with pytest.raises(TypeError, match="masked"):
        ns.matmul(np.ma.masked_array(x), w)


@pytest.mark.parametrize("batch", [1, 24])
def test_a_weight_gradient_of_known_shapes_reads_what_is_there_now(rng, batch):
    layout, other = (ns.Layout(ns.patterns.random(4, 5, 0.5, seed=seed)) for seed in (0, 1))
    w = matrix(rng, layout, 8, np.float32, (30, 37))
    x, dy = (rng.standard_normal((batch, n)).astype(np.float32) for n in (30, 37))
    packed = np.zeros(batch, "i1, (30,)f4")["f1"]  # rows begin at odd addresses
    packed[...] = 2 - x

    def check(x, dy, like, block_size=None):
        kept = like.layout if isinstance(like, ns.BlockSparse) else like
        exact = x.T.astype(np.float64) @ dy.astype(np.float64)
        size = block_size or like.block_size
        exact = ns.BlockSparse.from_dense(exact, kept, block_size=size).toarray()
        for _ in range(2):
            dw = ns.sddmm(x.T, dy, like, block_size=block_size)
            np.testing.assert_allclose(dw.toarray(), exact, rtol=0, atol=1e-4)
            assert (dw.dtype, dw.layout, dw.block_size) == (x.dtype, kept, size)

    check(x, dy, w)
    x[...], dy[...] = 1 - x, dy[::-1] * 2
    check(x, dy, w)
    check(x.astype(np.float64), dy.astype(np.float64), w)
    for some in (packed, np.asfortranarray(x), x[::-1]):
        check(some, dy, w)
        check(some, np.asfortranarray(dy), w)
    check(x, dy, matrix(rng, other, 8, np.float32, (30, 37)))
    check(dy, x, w.T)
    check(x, dy, layout, 8)
    check(x[:, :15], dy[:, :18], layout, 4)
    check(np.repeat(x, 2, axis=0), np.repeat(dy, 2, axis=0), w)
    whole = matrix(rng, layout, 8, np.float32, None)
    padded = [np.pad(a, ((0, 0), (0, n - a.shape[1]))) for a, n in ((x, 32), (dy, 40))]
    check(*padded, whole)
    check(*padded, layout, 8)
    with pytest.raises(ValueError, match="layout has the shape"):
        ns.sddmm(padded[0].T, padded[1], w)
    for wrong, error in ((dy.astype(np.float64), TypeError), (dy[:, :36], ValueError)):
        with pytest.raises(error, match=r"a and b take|layout has the shape"):
            ns.sddmm(x.T, wrong, w)
    for wrong in (8.0, [8]):
        with pytest.raises(TypeError, match="block_size takes"):
            ns.sddmm(x.T, dy, layout, block_size=wrong)
    for how in ({"kernel": "k9"}, {"precision": "low"}):
        with pytest.raises(ValueError, match="takes"):
            ns.sddmm(x.T, dy, w, **how)
