"""The products as JAX's primitives: values and derivatives as of masked weights, under vmap too."""

import operator
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: see CONTRIBUTING.md")

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402

import numbsparse as ns  # noqa: E402
import numbsparse.jax as nsj  # noqa: E402
from numbsparse.jax import products  # noqa: E402

LAYOUT = ns.Layout(ns.patterns.random(3, 4, 0.4, seed=0))  # of blocks of 4
SHAPES = [(12, 16), (10, 13)]
BATCHES = [(), (0,), (1,), (5,), (2, 0, 3), (2, 3)]
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


CPU = jax.devices("cpu")[0]


@pytest.fixture(autouse=True)
def of_64_bits_on_the_cpu():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    with jax.default_device(CPU):
        yield
    jax.config.update("jax_enable_x64", before)


def drawn(*shape, dtype=np.float64, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def matrix(shape=(12, 16), dtype=np.float64, transposed=False):
    w = nsj.BlockSparse(drawn(LAYOUT.n_blocks, 4, 4, dtype=dtype, seed=9), LAYOUT, shape=shape)
    return w.T if transposed else w


def sparse(x, w):
    return ((x @ w) ** 2).sum()


def dense(x, w):
    return ((x @ w.to_dense()) ** 2).sum()


def same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        close(ours, theirs)


@pytest.mark.pairs
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_gradients_of_both_operands(shape, batch, transposed):
    w = matrix(shape, transposed=transposed)
    x = drawn(*batch, w.shape[0])
    exact, whole = np.asarray(x), np.asarray(w.to_dense())
    close(x @ w, exact @ whole)
    of_x, of_w = jax.jit(jax.grad(sparse, (0, 1)))(x, w)
    assert jax.tree.structure(of_w) == jax.tree.structure(w)
    dy, kept = 2 * (exact @ whole), np.asarray(jax.tree.map(jnp.ones_like, w).to_dense())
    assert of_x.dtype == of_w.dtype == x.dtype
    close(of_x, dy @ whole.T)
    dw = exact.reshape(-1, w.shape[0]).T @ dy.reshape(-1, w.shape[1])
    close(of_w.to_dense(), dw * kept)
    assert jnp.count_nonzero(of_w.values) == jnp.count_nonzero(of_w.to_dense())  # 0 beyond the edge


def test_without_jit_all_is_the_same():
    """As in a debugger: `disable_jit` is not for primitives."""

    def gradients(x, values):
        w = nsj.BlockSparse(values, ns.Layout([[1, 0], [1, 1]]))
        return jax.vmap(jax.jit(jax.grad(lambda x, w: (x @ w @ w.T).sum(), (0, 1))), (0, None))(
            x, w
        )

    x, values = (jax.random.normal(jax.random.key(i), shape) for i, shape in
                 enumerate([(3, 2, 16), (3, 8, 8)]))  # fmt: skip
    expected = gradients(x, values)
    with jax.disable_jit():
        got = gradients(x, values)
        assert jax.config.jax_disable_jit
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, expected)


def test_second_derivatives_forward_of_reverse():
    w = matrix((10, 13))
    same(*(jax.jit(jax.hessian(f, (0, 1)))(drawn(1, 10), w) for f in (sparse, dense)))


def test_second_derivatives_reverse_of_reverse():
    w = matrix((10, 13), transposed=True)

    def slope(f, x, w):
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(f, (0, 1))(x, w)))

    both = [jax.jit(jax.grad(partial(slope, f), (0, 1))) for f in (sparse, dense)]
    same(*(f(drawn(2, 13), w) for f in both))


@pytest.mark.parametrize("batch", [(), (5,)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_features_first(batch, transposed):
    w = matrix((10, 13), transposed=transposed)
    x = drawn(w.shape[1], *batch)
    close(w @ x, w.to_dense() @ x)
    close(w @ np.asarray(x), w.to_dense() @ x)
    ours, theirs = (
        (lambda x, w: ((w @ x) ** 2).sum()),
        (lambda x, w: ((w.to_dense() @ x) ** 2).sum()),
    )
    same(*jax.jit(lambda x, w: [jax.grad(f, (0, 1))(x, w) for f in (ours, theirs)])(x, w))


@pytest.mark.pairs
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sddmm_and_its_derivatives(shape, rows, transposed):
    w = matrix(shape, transposed=transposed)
    a, b = drawn(w.shape[0], rows), drawn(rows, w.shape[1], seed=1)
    kept = jax.tree.map(jnp.ones_like, w).to_dense()
    close(nsj.sddmm(a, b, w).to_dense(), (a @ b) * kept)
    close(nsj.sddmm(a, b, w.layout, block_size=4).to_dense(), (a @ b) * kept)
    assert nsj.sddmm(a, b, w).layout == w.layout

    def ours(a, b):
        return (nsj.sddmm(a, b, w).values ** 3).sum()

    def theirs(a, b):
        return (((a @ b) * kept) ** 3).sum()

    same(*jax.jit(lambda a, b: [jax.grad(f, (0, 1))(a, b) for f in (ours, theirs)])(a, b))
    if rows == 1 and transposed:
        same(*(jax.jit(jax.hessian(f, (0, 1)))(a, b) for f in (ours, theirs)))


def test_beyond_the_edge_sddmm_is_zero():
    s = nsj.sddmm(drawn(10, 5), drawn(5, 13), matrix((10, 13)))
    assert jnp.count_nonzero(s.values) == jnp.count_nonzero(s.to_dense())


def test_results_are_written_whole():
    x, w, y = (np.asarray(a) for a in (drawn(5, 10), matrix().values, drawn(5, 13, seed=1)))
    how = {"layout": LAYOUT.word, "precision": "highest"}
    for compute, a, b, like in (
        (products._matmul, x, w, y),
        (products._transposed, y, w, x),
        (products._sddmm, x, y, w),
    ):
        out = np.full_like(like, np.nan)
        compute(a, b, out, **how)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_over_rows_is_one_product(axis):
    w, x = matrix((10, 13)), drawn(2, 5, 10)
    x = jnp.moveaxis(x, 0, axis)
    batched = jax.vmap(lambda x: x @ w, in_axes=axis, out_axes=1)
    close(batched(x), jnp.stack([a @ w.to_dense() for a in jnp.moveaxis(x, axis, 0)], 1))
    text = str(jax.make_jaxpr(batched)(x))
    assert text.count("block_sparse_matmul[") == 1
    assert "scan" not in text


@pytest.mark.parametrize("n", [0, 1, 3])
def test_vmap_over_weights_and_gradients_of_each_example(n):
    w, x = matrix((10, 13)), drawn(n, 10)
    several = jax.tree.map(lambda v: drawn(n, *v.shape), w)
    for axes in ((None, 0), (0, 0)):
        xs = x if axes[0] == 0 else drawn(4, 10)
        batched = [jax.vmap(f, axes) for f in (lambda x, w: x @ w, lambda x, w: x @ w.to_dense())]
        close(*(f(xs, several) for f in batched))
    each = [jax.jit(jax.vmap(jax.grad(f, 1), (0, None))) for f in (sparse, dense)]
    same(*(f(x, w) for f in each))


def test_a_training_step_is_compiled_once_for_a_layout():
    traced = []

    @jax.jit
    def step(w, x, y):
        traced.append(w.layout)
        loss, slope = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
        return jax.tree.map(lambda v, g: v - 0.5 * g, w, slope), loss

    true, w, x = matrix((10, 13)), jax.tree.map(jnp.zeros_like, matrix((10, 13))), drawn(64, 10)
    losses = []
    for _ in range(40):
        w, loss = step(w, x, x @ true)
        losses.append(loss)
    assert losses[-1] < losses[0] / 100
    equal = ns.Layout(LAYOUT.pattern)
    step(nsj.BlockSparse(w.values, equal, shape=w.shape), x, x @ true)
    assert len(traced) == 1
    other = ns.Layout(np.roll(LAYOUT.pattern, 1, 1))
    step(nsj.BlockSparse(w.values, other, shape=w.shape), x, x @ true)
    assert traced == [LAYOUT, other]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(dtype):
    w, x = matrix(dtype=jnp.dtype(dtype)), drawn(5, 12, dtype=jnp.dtype(dtype))
    y = jax.jit(lambda x, w: x @ w)(x, w)
    assert y.dtype == dtype
    exact, whole = (np.asarray(a, np.float64) for a in (x, w.to_dense()))
    size = abs(exact) @ abs(whole)
    bound = 14 * 2.0**-23 * size + float(jnp.finfo(dtype).eps) * abs(exact @ whole)
    assert (abs(np.asarray(y, np.float64) - exact @ whole) <= bound).all()
    slopes = jax.tree.leaves(jax.grad(sparse, (0, 1))(x, w))
    assert [g.dtype.name for g in slopes] == [dtype, dtype]


def test_no_dense_array_is_made_silently():
    for make in (np.asarray, jnp.asarray):
        with pytest.raises(TypeError, match=r"not made dense silently: call .* \.to_dense\(\)"):
            make(matrix())


def test_operands_are_not_copied(monkeypatch):
    seen = []
    matmul = products.ops.matmul
    monkeypatch.setattr(
        products.ops,
        "matmul",
        lambda x, w, **how: seen.append((x, w.values)) or matmul(x, w, **how),
    )
    w, x = matrix(), drawn(5, 12)
    jax.block_until_ready(x @ w)
    ((got, values),) = seen
    assert got.ctypes.data == x.unsafe_buffer_pointer()
    assert values.ctypes.data == w.values.unsafe_buffer_pointer()


def test_precision_of_a_gradient_is_that_of_its_product():
    w, x = matrix(dtype=np.float32), drawn(5, 12, dtype=np.float32)
    with ns.set_precision("high"):
        jaxpr = jax.make_jaxpr(jax.grad(sparse, (0, 1)))(x, w)
    assert str(jaxpr).count("precision=high\n") == 3
    assert "precision=highest" not in str(jaxpr)


def test_a_pytree_with_one_leaf():
    w = matrix((10, 13), transposed=True)
    ((path, leaf),), tree = jax.tree_util.tree_flatten_with_path(w)
    assert jax.tree_util.keystr(path) == ".values"
    assert leaf is w.values
    assert hash(tree) == hash(jax.tree.structure(matrix((10, 13), transposed=True)))
    assert tree != jax.tree.structure(w.T)
    half = jax.tree.map(lambda v: v.astype(jnp.float16), w)
    assert (half.dtype, half.shape, half.block_size) == (jnp.float16, (13, 10), 4)
    close(half.to_dense(), w.to_dense().astype(jnp.float16))
    assert "values=None" in repr(jax.tree.map(lambda v: None, w))
    assert "values=Array(" in repr(jax.tree.map(lambda v: v.sum(), w))
    assert "values of (2, 5, " in repr(jax.tree.map(lambda v: jnp.stack([v, v]), w))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_from_dense_drops_what_the_layout_does_not_keep(shape):
    array = drawn(*shape)
    kept = jax.tree.map(jnp.ones_like, matrix(shape)).to_dense()
    w = nsj.BlockSparse.from_dense(array, LAYOUT, block_size=4)
    close(w.to_dense(), array * kept)
    of_numpy = ns.BlockSparse.from_dense(np.asarray(array), LAYOUT, block_size=4)
    close(w.values, of_numpy.data)


with jax.default_device(CPU):
    X, W = np.ones((2, 12), np.float32), matrix(dtype=np.float32)


def test_a_matrix_has_two_axes():
    assert W.ndim == W.T.ndim == len(W.shape)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nsj.BlockSparse([1.0], LAYOUT), TypeError, "values takes an array of JAX or NumP"),
        (lambda: nsj.BlockSparse(jnp.ones((5, 4, 4), int), LAYOUT), TypeError, "float64, got int"),
        (lambda: nsj.BlockSparse(jnp.ones((3, 4, 4)), LAYOUT), ValueError, r"takes the shape \(5,"),
        (lambda: matrix((8, 16)), ValueError, r"shape takes at most \(12, 16\) and less than a bl"),
        (lambda: X[:, :8] @ W, ValueError, r"x takes the shape \(\.\.\., 12\) with this w"),
        (lambda: X.astype(np.float16) @ W, TypeError, "x and w take one dtype, got float16"),
        (lambda: W @ X.T[:, :, None], ValueError, "w @ x takes an x of one or two axes, got 3"),
        (lambda: W @ jnp.ones((3, 2)), ValueError, r"in w @ x, x takes the.*got \(3, 2\)"),
        (lambda: W @ jnp.ones(3), ValueError, rf"\({W.shape[1]}, batch\).*got \(3,\)"),
        *(
            (lambda change=change: X @ jax.tree.map(change, W), error, says)
            for change, error, says in (
                (lambda v: v[1:], ValueError, r"values takes the shape \(5, B, B\)"),
                (lambda v: jnp.stack([v, v]), ValueError, r"values takes the shape \(5, B, B\)"),
                (lambda v: v[:, 1:, 1:], ValueError, r"w\.shape takes at most \(9, 12\)"),
                (lambda v: v.tolist(), TypeError, "w.values takes an array of JAX or NumPy"),
            )
        ),
        (lambda: nsj.matmul(X, X), TypeError, "w takes a BlockSparse of numbsparse.jax"),
        (lambda: nsj.matmul(W, W), TypeError, "w takes an array of JAX or NumPy"),
        (lambda: nsj.matmul(X, W, precision="low"), ValueError, "precision takes one of"),
        (lambda: nsj.sddmm(X, X, LAYOUT), ValueError, r"take the shapes \(in_features, batch\)"),
        (lambda: nsj.sddmm(X.T, X.astype(np.float64), LAYOUT), TypeError, "a and b take one dtype"),
        (lambda: nsj.sddmm(X.T, X, LAYOUT), ValueError, r"block_size is needed: features \(12, 12"),
        (lambda: nsj.sddmm(X.T, X, LAYOUT, block_size=2), ValueError, r"a @ b, in blocks of 2, t"),
        (lambda: nsj.sddmm(X.T, X, W, block_size=8), ValueError, "block_size takes that of layout"),
        (
            lambda: nsj.sddmm(jnp.ones((15, 2)), jnp.ones((2, 20)), LAYOUT),
            ValueError,
            "block_size takes one of .*, got 5",
        ),
        (
            lambda: jnp.ones((2, 15)) @ nsj.BlockSparse(jnp.ones((5, 5, 5)), LAYOUT),
            ValueError,
            "block_size takes one of .*, got 5",
        ),
        (
            lambda: nsj.BlockSparse.from_dense(X, LAYOUT, block_size=4),
            ValueError,
            "array.shape tak",
        ),
    ],
)
def test_refusals(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_what_is_lowered_for_which_device():
    traced = jax.jit(lambda x, w: x @ w).trace(X, W)
    forms = " ".join(map(str, (X.dtype, *X.shape, *W.values.shape, X.shape[0], W.shape[1])))
    assert f'"{LAYOUT.word} highest {forms}"' in traced.lower().as_text()
    assert "numbsparse_block_sparse_matmul" in traced.lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(NotImplementedError, match="on the CPU and on NVIDIA GPUs"):
        traced.lower(lowering_platforms=("tpu",))
    wide = jax.jit(lambda x, w: x @ w).trace(drawn(2, 12), matrix())
    with pytest.raises(TypeError, match="arrays on a GPU take float16, bfloat16 or float32"):
        wide.lower(lowering_platforms=("cuda",))


def test_shard_map_that_checks_what_varies_is_refused_and_else_taken():
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has no jax.shard_map")
    mesh = jax.make_mesh((1,), ("n",), axis_types=(jax.sharding.AxisType.Auto,), devices=[CPU])
    over = jax.sharding.PartitionSpec("n")
    how = {"mesh": mesh, "in_specs": over, "out_specs": over}
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        jax.shard_map(lambda x: x @ W, **how)(jnp.asarray(X))
    close(jax.shard_map(lambda x: x @ W, check_vma=False, **how)(jnp.asarray(X)), X @ W)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_what_is_dealt_nowhere_is_taken_within_a_mesh(kind):
    """JAX says of such arrays that they lie on all of the mesh, but not along which axes."""
    devices = jax.devices("cpu")[:4]
    if len(devices) < 4 or not hasattr(jax, "set_mesh"):
        pytest.skip("XLA_FLAGS give fewer than four devices, or this JAX has no jax.set_mesh")
    kinds = (getattr(jax.sharding.AxisType, kind),)
    x, w = drawn(8, 10), matrix((10, 13))
    expected = x @ w, *jax.grad(sparse, (0, 1))(x, w)
    with jax.set_mesh(jax.make_mesh((4,), ("n",), axis_types=kinds, devices=devices)):
        same((x @ w, *jax.jit(jax.grad(sparse, (0, 1)))(x, w)), expected)


@pytest.mark.parametrize(
    ("lies", "stays"), [((), ()), (("n",), ("n",)), ((("m", "n"),), (("m", "n"),)),
                        (("n", "m"), ("n",)), ((None, "n"), ())], ids=str,
)  # fmt: skip
def test_rows_that_lie_on_several_devices_stay_there(lies, stays):
    """Each device multiplies its own; the weight's gradient is summed over them."""
    devices = np.array(jax.devices("cpu")[:4])
    if len(devices) < 4:
        pytest.skip("XLA_FLAGS of this run give fewer than four devices of the CPU")
    mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("m", "n"))

    def put(array, axes=()):
        over = jax.sharding.PartitionSpec(*axes)
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, over))

    w, x = matrix((10, 13)), drawn(8, 10)
    run = jax.jit(jax.value_and_grad(lambda x, w: (((y := x @ w) ** 2).sum(), y), (0, 1), True))
    (_, y), (of_x, of_w) = run(put(x, lies), put(w))
    for array, axes in ((y, stays), (of_x, stays), (of_w.values, ())):
        assert array.sharding.spec == jax.sharding.PartitionSpec(*axes)
    same((of_x, of_w), jax.grad(sparse, (0, 1))(x, w))
    close(y, x @ w)
    gathered = "all-gather" in run.lower(put(x, lies), put(w)).compile().as_text()
    assert gathered == (len(lies) == 2)


def test_what_a_handler_raises_is_the_error_of_xla(monkeypatch):
    def broken(*operands, **how):
        raise FloatingPointError("a handler broke off")

    monkeypatch.setattr(products.ops, "matmul", broken)
    with pytest.raises(Exception, match="FloatingPointError: a handler broke off"):
        jax.block_until_ready(drawn(3, 12) @ matrix())


@pytest.mark.parametrize("products", [1, 40])
@pytest.mark.parametrize("results", ["kept", "dropped"])
def test_python_ends_while_xla_computes(results, products):
    code = f"""
import jax, jax.numpy as jnp, numbsparse.jax as nsj
w = nsj.BlockSparse(jnp.ones((64, 32, 32)), [[1] * 8] * 8)
many = jax.jit(lambda x: [(x + i) @ w for i in range({products})])
{results} = many(jnp.ones((512, 256)))
if {results == "dropped"}:
    del dropped
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stderr
    assert "Error" not in run.stderr


def test_an_exported_program_runs_where_a_matrix_of_its_layout_was_made(rng, monkeypatch):
    layout = ns.Layout(ns.patterns.random(4, 3, 0.5, seed=7))
    values = rng.standard_normal((layout.n_blocks, 8, 8)).astype(np.float32)
    x = rng.standard_normal((5, 32)).astype(np.float32)
    checks = [export.DisabledSafetyCheck.custom_call("numbsparse_block_sparse_matmul")]
    multiply = jax.jit(lambda x, v: x @ nsj.BlockSparse(v, layout))
    exported = export.export(multiply, platforms=["cpu"], disabled_checks=checks)(x, values)
    monkeypatch.setattr(products, "_layouts", {})  # as in another process
    with pytest.raises(jax.errors.JaxRuntimeError, match="no layout here has the word '4x3-"):
        exported.call(x, values)
    w = nsj.BlockSparse(values, layout.pattern)
    np.testing.assert_allclose(exported.call(x, values), x @ np.asarray(w.to_dense()), atol=1e-4)


@pytest.mark.parametrize("shape", ["n, 10", "2*n+1, m, 10"])
def test_a_program_for_any_number_of_rows(shape):
    names = [f"numbsparse_{product.name}" for product in products.PRODUCTS]
    checks = list(map(export.DisabledSafetyCheck.custom_call, names))
    values = matrix((10, 13)).values
    step = jax.jit(
        jax.grad(lambda x, v: sparse(x, nsj.BlockSparse(v, LAYOUT, shape=(10, 13))), (0, 1))
    )
    of_any = jax.ShapeDtypeStruct(export.symbolic_shape(shape), np.float64), values
    exported = export.export(step, platforms=["cpu"], disabled_checks=checks)(*of_any)
    for n in (3, 1, 5):
        x = drawn(n, 10) if "m" not in shape else drawn(2 * n + 1, n + 1, 10)
        same(exported.call(x, values), step(x, values))


def test_matrices_are_not_compared_by_identity():
    w, other = matrix(), matrix()
    for compare in (operator.eq, operator.ne):
        with pytest.raises(TypeError, match="compare their values and layouts"):
            compare(w, other)
    assert w != "a word"
    assert len({w, other}) == 2
