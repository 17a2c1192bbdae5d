"""The products as torch's operators: values and gradients of any order, as of a masked matrix."""

import copy
import gc
import operator
import pickle

import numpy as np
import pytest
from conftest import needs_bfloat16
from torch_helpers import drawn, grads, layout, ns, nst, torch

OPS = torch.ops.numbsparse
LAYOUT = layout(3, 4)  # of blocks of 4
SHAPES = [(12, 16), (10, 13)]
BATCHES = [(), (0,), (1,), (5,), (2, 0, 3), (2, 3)]


def matrix(shape=(12, 16), dtype=torch.float64, of=LAYOUT):
    return nst.BlockSparse(drawn(of.n_blocks, 4, 4, dtype=dtype), of, shape=shape)


def test_a_matrix_moves_as_its_values_do():
    w = matrix((10, 13), torch.float32)
    for of, dense in ((w, w.to_dense()), (w.T, w.to_dense().T)):
        wide = of.to(torch.float64)
        assert (wide.shape, wide.layout, wide.dtype) == (of.shape, of.layout, torch.float64)
        assert torch.equal(wide.to_dense(), dense.double())
        assert of.to("meta").device.type == "meta"
    wide.to_dense().sum().backward()
    assert w.values.grad.any()
    with pytest.raises(TypeError, match=r"got torch.int32"):
        w.to(torch.int32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_gradients_of_both_orders(shape, batch, transposed):
    w = matrix(shape)
    w = w.T if transposed else w
    x = drawn(*batch, w.shape[0], seed=1)
    inputs, y, expected = [x, w.values], x @ w, x @ w.to_dense()
    torch.testing.assert_close(y, expected)
    first = grads(y, inputs, create_graph=True)
    of_dense = grads(expected, inputs, create_graph=True)
    torch.testing.assert_close(first, of_dense)
    torch.testing.assert_close(grads(first, inputs), grads(of_dense, inputs))


@pytest.mark.parametrize("batch", [(), (5,)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_features_first(batch, transposed):
    w = matrix((10, 13))
    w = w.T if transposed else w
    x = drawn(w.shape[1], *batch, seed=1)
    y, expected = w @ x, w.to_dense() @ x
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads(y, [x, w.values]), grads(expected, [x, w.values]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [0, 5])
def test_sddmm_and_gradients_of_both_orders(shape, rows):
    like = matrix(shape)
    a, b = drawn(shape[0], rows), drawn(rows, shape[1], seed=1)
    for of in (like, LAYOUT):
        s = nst.sddmm(a, b, of, block_size=4)
        mask = nst.BlockSparse(torch.ones_like(like.values), LAYOUT, shape=shape).to_dense()
        expected = (a @ b) * mask
        torch.testing.assert_close(s.to_dense(), expected)
    inside = torch.isfinite(s.values).all() and s.values.count_nonzero() == expected.count_nonzero()
    assert inside  # zero beyond the edge
    first = grads(s.values, [a, b], create_graph=True)
    of_dense = grads(expected, [a, b], create_graph=True)
    torch.testing.assert_close(first, of_dense)
    torch.testing.assert_close(grads(first, [a, b]), grads(of_dense, [a, b]))


def test_sddmm_of_a_transposed_layout():
    w, a, b = matrix((10, 13)).T, drawn(13, 5), drawn(5, 10)
    s = nst.sddmm(a, b, w)
    assert s.layout == w.layout
    kept = nst.BlockSparse(torch.ones_like(w.values), LAYOUT, shape=(10, 13)).to_dense().T
    torch.testing.assert_close(s.to_dense(), (a @ b) * kept)


def test_finite_differences():
    x, values = drawn(3, 10), drawn(LAYOUT.n_blocks, 4, 4)

    def product(x, values):
        return x @ nst.BlockSparse(values, LAYOUT, shape=(10, 13))

    assert torch.autograd.gradcheck(product, (x, values))
    assert torch.autograd.gradgradcheck(product, (x, values))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch.library.opcheck itself
def test_operators_are_what_torch_asks_of_them():
    x, y, values = drawn(2, 3, 10), drawn(2, 3, 13), drawn(LAYOUT.n_blocks, 4, 4)
    how = (matrix().handle.word, 10, 13, 4, "highest")
    torch.library.opcheck(OPS.matmul.default, (x, values, *how))
    torch.library.opcheck(OPS.matmul_transposed.default, (y, values, *how))
    torch.library.opcheck(OPS.sddmm.default, (x, y, *how))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, pytest.param(torch.bfloat16, marks=needs_bfloat16), torch.float32],
    ids=str,
)
def test_dtypes(dtype):
    w, x = matrix(dtype=dtype), drawn(5, 12, dtype=dtype)
    y = x @ w
    assert y.dtype == dtype
    exact, dense = x.double(), w.to_dense().double()
    size = exact.abs() @ dense.abs()
    bound = 14 * 2.0**-23 * size + torch.finfo(dtype).eps * (exact @ dense).abs()
    assert ((y.double() - exact @ dense).abs() <= bound).all()
    assert {g.dtype for g in grads(y, [x, w.values])} == {dtype}


def test_strided_and_expanded_operands():
    w, base = matrix(), drawn(24, 10)
    x = base.T[:, ::2]
    torch.testing.assert_close(x @ w, x @ w.to_dense())
    (got,) = torch.autograd.grad((x @ w).sum(), w.values)  # of a gradient that is one number
    (expected,) = torch.autograd.grad((x @ w.to_dense()).sum(), w.values)
    torch.testing.assert_close(got, expected)


def test_no_copies_on_the_cpu():
    x, values = drawn(5, 12), drawn(LAYOUT.n_blocks, 4, 4)
    assert nst.operators.lent(x, "x").ctypes.data == x.data_ptr()
    assert nst.BlockSparse(values, LAYOUT).values is values
    array = np.ones((2, 3))
    assert nst.operators.given_back(array, x).data_ptr() == array.ctypes.data


@pytest.mark.parametrize("enabled", [False, True])
@needs_bfloat16
def test_autocast(enabled):
    w, x = matrix(dtype=torch.float32), drawn(5, 12, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        y = x @ w
        s = nst.sddmm(x.T, drawn(5, 16, dtype=torch.bfloat16 if enabled else x.dtype), LAYOUT)
        called = torch.ops.numbsparse.matmul(x, w.values, *w.form, "highest")
    assert {y.dtype, s.dtype} == {torch.bfloat16 if enabled else torch.float32}
    torch.testing.assert_close(called, y, rtol=0, atol=0)
    narrow = [a.detach().to(y.dtype).requires_grad_() for a in (x, w.values)]
    torch.testing.assert_close(y, narrow[0] @ nst.BlockSparse(narrow[1], LAYOUT), rtol=0, atol=0)
    first = grads(y, [x, w.values])
    assert {g.dtype for g in first} == {torch.float32}
    torch.testing.assert_close(grads(called, [x, w.values]), first, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        assert (drawn(5, 12) @ matrix()).dtype == torch.float64  # as torch's own products
        for dtype in (torch.int64, torch.complex64):
            for call in (lambda a: a @ w, lambda a: nst.sddmm(a.T, x.detach(), LAYOUT)):
                with pytest.raises(TypeError, match="take one dtype, got torch"):
                    call(x.detach().to(dtype))


def test_precision_of_a_gradient_is_that_of_its_product(monkeypatch):
    seen = []
    sddmm = nst.operators.ops.sddmm
    monkeypatch.setattr(
        nst.operators.ops,
        "sddmm",
        lambda *a, **how: seen.append(how["precision"]) or sddmm(*a, **how),
    )
    w, x = matrix(dtype=torch.float32), drawn(5, 12, dtype=torch.float32)
    with ns.set_precision("high"):
        y = x @ w
    y.sum().backward()
    nst.matmul(x, w, precision="highest").sum().backward()
    assert seen == ["high", "highest"]


def test_a_layout_lives_as_long_as_who_needs_it():
    pattern = ns.patterns.random(5, 3, 0.5, seed=9)
    w, x = nst.BlockSparse(drawn(int(pattern.sum()), 4, 4), pattern), drawn(2, 20)
    word, values, expected = w.handle.word, w.values, x @ w.to_dense()
    y = x @ w
    del w
    gc.collect()
    y.sum().backward()  # the tape has it
    del y
    gc.collect()
    with pytest.raises(LookupError, match=f"no layout here has the handle '{word}'"):
        OPS.matmul(x, values, word, 20, 12, 4, "highest")
    again = nst.BlockSparse(values, pattern)
    assert again.handle.word == word
    torch.testing.assert_close(x @ again, expected)
    for copied in (copy.deepcopy(again.handle), pickle.loads(pickle.dumps(again.handle))):
        del again
        gc.collect()
        again = nst.BlockSparse(values, copied)
        torch.testing.assert_close(x @ again, expected)
        del copied
        gc.collect()


def test_equal_layouts_keep_the_one_that_is_known():
    first, second = layout(6, 5, seed=8), layout(6, 5, seed=8)
    word = nst.handles.Handle(first).word
    assert nst.handles.Handle(second).word == word
    del first
    gc.collect()
    assert nst.handles.layout_of(word) == second
    del second
    gc.collect()
    with pytest.raises(LookupError):
        nst.handles.layout_of(word)


X, W = drawn(2, 12), matrix()


def with_values(values):
    """A product of a matrix whose values others took the place of."""
    w = matrix()
    w.values = values.to(X.dtype)
    return X @ w


def test_a_matrix_has_two_axes():
    assert W.ndim == W.T.ndim == len(W.shape)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nst.BlockSparse(np.ones((5, 4, 4)), LAYOUT), TypeError, "values takes a tensor"),
        (lambda: nst.BlockSparse(torch.ones(5, 4, 4).int(), LAYOUT), TypeError, "got torch.int32"),
        (lambda: nst.BlockSparse(torch.ones(3, 4, 4), LAYOUT), ValueError, r"takes the shape \(5,"),
        (lambda: matrix((8, 16)), ValueError, r"shape takes at most \(12, 16\) and less than a bl"),
        (lambda: X[:, :8] @ W, ValueError, r"x takes the shape \(\.\.\., 12\) with this w"),
        *(
            (
                lambda x=x: W @ x,
                ValueError,
                rf"in w @ x, x takes the shape \({W.shape[1]}, batch\).*got {says}",
            )
            for x, says in ((torch.ones(3, 2), r"\(3, 2\)"), (torch.ones(()), r"\(\)"))
        ),
        (lambda: X.float() @ W, TypeError, "x and w take one dtype, got torch.float32"),
        *(
            (
                lambda size=size: with_values(torch.ones(5, size, size)),
                ValueError,
                r"w\.shape takes",
            )
            for size in (2, 8)  # of which the kernel would read other features than w has
        ),
        (lambda: nst.matmul(X, X), TypeError, "w takes a BlockSparse of numbsparse.torch"),
        (lambda: nst.matmul(W, W), TypeError, "w takes a tensor of torch"),
        (lambda: nst.matmul(5, W), TypeError, "x takes a tensor of torch"),
        (lambda: X.detach().numpy() @ W, TypeError, "x takes a tensor of torch, got numpy.ndarray"),
        (lambda: np.asarray(W), TypeError, r"not made dense silently: call .* \.to_dense\(\)"),
        (lambda: ns.matmul(X, W), TypeError, "takes one BlockSparse, .* a numbsparse.torch.Block"),
        (lambda: nst.matmul(X.to("meta"), W), ValueError, "x and w take one device, got meta"),
        (lambda: nst.matmul(X, W, precision="low"), ValueError, "precision takes one of"),
        (lambda: nst.sddmm(X, X, LAYOUT), ValueError, r"take the shapes \(in_features, batch\)"),
        (lambda: nst.sddmm(X.T, X.float(), LAYOUT), TypeError, "a and b take one dtype"),
        (lambda: nst.sddmm(X.T, X, W, block_size=8), ValueError, "block_size takes that of layout"),
        (lambda: nst.sddmm(X.T[:10], X[:, :10], LAYOUT), ValueError, "block_size is needed: fea"),
        (lambda: nst.sddmm(X.T, X, LAYOUT, block_size=2), ValueError, r"a @ b, in blocks of 2, t"),
    ],
)
def test_refusals(call, error, says):
    with pytest.raises(error, match=says):
        call()
    if "dtype" not in says:  # which autocast makes one of
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(error, match=says):
            call()


def test_matrices_are_not_compared_by_identity():
    w, other = matrix(), matrix()
    for compare in (operator.eq, operator.ne):
        with pytest.raises(TypeError, match="compare their values and layouts"):
            compare(w, other)
    assert w != "a word"
    assert len({w, other}) == 2
