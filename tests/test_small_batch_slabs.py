"""k8_small_batch reads feature-major activations of an odd batch where they are."""

from itertools import product

import numpy as np
import pytest
from conftest import HALVES
from memories_helpers import MEMORIES, check, error_of, placed
from ptx_helpers import needs_ampere

from numbsparse import BlockSparse, Layout, ops
from numbsparse.device import SIMULATED, to_device
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import k0_reference
from numbsparse.kernels.matmul import k8_small_batch as rung
from numbsparse.kernels.matmul.k8_small_batch import launch, lines
from numbsparse.kernels.parts import aligned, store_lines
from numbsparse.kernels.parts.store import SLABS
from numbsparse.kernels.parts.tiles import WIDTH, Operand

pytestmark = needs_ampere
DTYPES = ["float32", *HALVES]
NUMBERS = [("float32", "high"), *((dtype, "highest") for dtype in DTYPES)]
BLOCKS = [  # how features are read depends on both
    pytest.param((B, whole), id=f"{B}-{'whole' if whole else 'ragged'}")
    for B, whole in product([8, 16, 32], [False, True])
]
MEMORY_PAIRS = list(product(MEMORIES[:2], repeat=2))[1:]
ROWS = [range(2, 16), range(17, 32), range(33, 63)]


@pytest.fixture
def copies(monkeypatch):
    """The shapes of what is copied."""
    shapes, copy = [], aligned.copy_matrices

    def remember(*copies):
        shapes.extend(a.shape for _, a in copies)
        copy(*copies)

    monkeypatch.setattr(aligned, "copy_matrices", remember)
    return shapes


def by_the_engine(B):
    return B >= WIDTH and launch.has_engine()


def read_in_place(a, B, operands=1):
    """Whether gapless features of a are read as one piece of memory, from 16 bytes on, or word by
    word."""
    whole = by_the_engine(B) and a.shape[1] % B == 0
    if len(a) <= (2 * WIDTH if whole else 16):
        return True
    if a.itemsize == 2 and (operands == 1 or B < WIDTH):
        return True
    if operands == 1 and whole:
        return True
    return a.itemsize == 4 and not by_the_engine(B)


def drawn_case(rng, name, B, dtype):
    large = (2, 2 if SIMULATED else 3)  # units are of WIDTH
    pattern = rng.random((3, 4) if B <= WIDTH else large) < 0.6
    pattern[1, -1], pattern[:, 0] = True, False  # a line of outputs is empty, one is not
    layout = Layout(pattern)
    n_in, n_out = (B * n - int(rng.integers(0, min(B, 20))) for n in layout.shape)
    if name == "input_grad":
        n_in, n_out = n_out, n_in
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(as_dtype(dtype))
    return layout, values, n_in, n_out


def check_weight_grad(x, dy, layout, values, memories, precision):
    """Against float64; `values` say which shape and dtype it has."""
    got = to_device(np.full_like(values, np.nan))
    there = [placed(a, memory)[0] for a, memory in zip((x, dy), memories, strict=True)]
    rung.weight_grad(*there, ops.index_beside(layout, got), got, precision)
    expected, magnitude = np.zeros(values.shape), np.zeros(values.shape)
    exact = [a.astype(np.float64) for a in (x, dy)]
    k0_reference.weight_grad(*exact, layout.index, expected)
    k0_reference.weight_grad(*map(abs, exact), layout.index, magnitude)
    bound = error_of(precision) * magnitude + float(finfo(x.dtype).eps) * abs(expected)
    assert (abs(got.numpy().astype(np.float64) - expected) <= bound).all()  # NaN is not


@pytest.mark.pairs
@pytest.mark.parametrize("rows", ROWS, ids=["few", "up to 32", "more"])
@pytest.mark.parametrize("y_memory", MEMORIES)
@pytest.mark.parametrize("numbers", NUMBERS, ids=", ".join)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", ["forward", "input_grad"])
def test_gapless_features(name, blocks, numbers, y_memory, rows, rng, copies):
    (B, whole), (dtype, precision) = blocks, numbers
    layout, values, n_in, n_out = drawn_case(rng, name, B, dtype)
    if whole:
        n_in, n_out = (-(-n // B) * B for n in (n_in, n_out))
    batch = int(rng.choice(rows))
    while batch * values.itemsize % aligned.BYTES == 0:  # then x.T is aligned
        batch += 1
    x = rng.standard_normal((batch, n_in)).astype(values.dtype)
    check(rung, name, x, values, layout, n_out, "feature-major", y_memory, precision)
    assert copies == ([] if read_in_place(x, B) else [x.T.shape])


@pytest.mark.pairs
@pytest.mark.parametrize("B", [8, 32])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("batch", [5, 2 * WIDTH + 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["forward", "input_grad"])
def test_other_memory_is_copied(name, dtype, batch, memory, B, rng, copies):
    """Where the first feature begins inside a word, or, for the copy engine, inside 16 bytes."""
    layout, values, _, _ = drawn_case(rng, name, B, dtype)
    n_in, n_out = (3 * B, 4 * B) if name == "forward" else (4 * B, 3 * B)
    x = rng.standard_normal((batch, n_in)).astype(values.dtype)
    check(rung, name, x, values, layout, n_out, memory, "feature-major, inside")
    copied = memory == "feature-major, inside" and (dtype != "float32" or by_the_engine(B))
    assert copies == ([(n_in, batch)] if copied else [])


@pytest.mark.pairs
@pytest.mark.parametrize("rows", ROWS, ids=["few", "up to 32", "more"])
@pytest.mark.parametrize("second", MEMORIES[:2])
@pytest.mark.parametrize("first", MEMORIES[:2])
@pytest.mark.parametrize("numbers", NUMBERS, ids=", ".join)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_gapless_factors(blocks, numbers, first, second, rows, rng, copies):
    (B, whole), (dtype, precision) = blocks, numbers
    layout, values, *widths = drawn_case(rng, "forward", B, dtype)
    if whole:
        widths = [-(-n // B) * B for n in widths]
    batch = int(rng.choice(rows))
    while batch * values.itemsize % aligned.BYTES == 0:
        batch += 1
    x, dy = factors = [rng.standard_normal((batch, n)).astype(values.dtype) for n in widths]
    check_weight_grad(x, dy, layout, values, (first, second), precision)
    copied = []
    for a, memory in zip(factors, (first, second), strict=True):
        if memory == "feature-major":
            copied += [] if read_in_place(a, B, 2) else [a.T.shape]
        elif a.shape[1] * a.itemsize % aligned.BYTES:
            copied.append(a.shape)
    assert copies == copied


@pytest.mark.pairs
@pytest.mark.parametrize(
    "rows",
    [*ROWS[1:], range(64, 3 * WIDTH + 1 if SIMULATED else 100)],
    ids=["up to 32", "more", "steps"],
)
@pytest.mark.parametrize("second", MEMORIES)
@pytest.mark.parametrize("first", MEMORIES[2:])
@pytest.mark.parametrize("numbers", NUMBERS, ids=", ".join)
@pytest.mark.parametrize("B", [8, 16, 32, 64])
def test_features_that_begin_anywhere(B, numbers, first, second, rows, rng):
    """Nothing of what is around them counts, as rows of a sum or of another line."""
    dtype, precision = numbers
    layout, values, *widths = drawn_case(rng, "forward", B, dtype)
    batch = int(rng.choice(rows))
    x, dy = (rng.standard_normal((batch, n)).astype(values.dtype) for n in widths)
    check_weight_grad(x, dy, layout, values, (first, second), precision)
    check(rung, "forward", x, values, layout, widths[1], first, second, precision)


@pytest.mark.pairs
@pytest.mark.parametrize("many", [False, True], ids=["few units", "many units"])
@pytest.mark.parametrize("batch", [33, 65, 66, 127, 131])
@pytest.mark.parametrize("x_memory", MEMORIES[1:3])
@pytest.mark.parametrize("y_memory", MEMORIES)
@pytest.mark.parametrize("numbers", NUMBERS, ids=", ".join)
@pytest.mark.parametrize("B", [8, 16, 32, 64])
@pytest.mark.parametrize("name", ["forward", "input_grad"])
def test_features_are_loaded_from_16_bytes_on(
    name, B, numbers, y_memory, x_memory, batch, many, rng, copies, monkeypatch
):
    """By the copy engine, and by lanes where units are few, which else have words of float32 only;
    of tiles whose last rows are not there, and of lines in parts."""
    dtype, precision = numbers
    layout, values, _, _ = drawn_case(rng, name, B, dtype)
    n_in, n_out = (B * n for n in layout.shape[:: 1 if name == "forward" else -1])
    x = rng.standard_normal((batch, n_in)).astype(values.dtype)
    most = dict.fromkeys(launch.MOST_BY_WORDS, 0 if many else 99)
    monkeypatch.setattr(launch, "MOST_BY_WORDS", most)
    monkeypatch.setattr(launch, "BOXED", 0 if many else 99)
    check(rung, name, x, values, layout, n_out, x_memory, y_memory, precision)
    line = (batch if x_memory == "feature-major" else batch + 2) * x.itemsize
    slab = batch <= 2 * WIDTH and x_memory == "feature-major"
    sparing = name == "input_grad" and numbers == ("float32", "highest") and not slab
    copied = many and (sparing or not by_the_engine(B)) and line % aligned.BYTES > 0
    assert copies == ([x.T.shape] if copied else [])


def check_slab(x, B, along=False):
    """Short aligned features of large blocks are read as one piece of memory."""
    there = placed(x, "feature-major")[0]
    nbytes = len(x) * x.itemsize
    short = nbytes <= 32 or (nbytes < aligned.LINE and nbytes % 32 > 0)
    short = nbytes <= 64 if x.itemsize == 4 and not along else short
    served = by_the_engine(B) or (len(x) <= (24 if x.itemsize == 2 else 16) and not along)
    assert launch.is_even(there, launch.slab_of(there, B, along)) == (short and served)


@pytest.mark.pairs
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("y_memory", MEMORIES)
@pytest.mark.parametrize("numbers", NUMBERS, ids=", ".join)
@pytest.mark.parametrize("B", [8, 32, 64])
@pytest.mark.parametrize("name", ["forward", "input_grad"])
def test_aligned_features_without_gaps(name, B, numbers, y_memory, pieces, rng, copies):
    """Of so many pieces of 16 bytes."""
    dtype, precision = numbers
    layout, values, *_ = drawn_case(rng, name, B, dtype)
    n_in, n_out = (B * n for n in layout.shape[:: 1 if name == "forward" else -1])
    x = rng.standard_normal((pieces * aligned.BYTES // values.itemsize, n_in)).astype(values.dtype)
    check_slab(x, B)
    check(rung, name, x, values, layout, n_out, "feature-major", y_memory, precision)
    assert not copies


@pytest.mark.pairs
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("memories", MEMORY_PAIRS, ids=", ".join)
@pytest.mark.parametrize("numbers", NUMBERS, ids=", ".join)
@pytest.mark.parametrize("B", [8, 32, 64])
def test_aligned_factors_without_gaps(B, numbers, memories, pieces, rng, copies):
    """What is behind a feature's rows is of the next one, and no term of its sum."""
    dtype, precision = numbers
    layout, values, *_ = drawn_case(rng, "forward", B, dtype)
    batch = pieces * aligned.BYTES // values.itemsize
    widths = [B * n for n in layout.shape]
    x, dy = (rng.standard_normal((batch, n)).astype(values.dtype) for n in widths)
    check_slab(x, B, along=True)
    check_weight_grad(x, dy, layout, values, memories, precision)
    assert not copies


@pytest.mark.parametrize("memories", MEMORY_PAIRS, ids=", ".join)
@pytest.mark.parametrize("numbers", NUMBERS, ids=", ".join)
def test_a_slab_is_one_step_of_a_sum(numbers, memories, rng):
    """However few units a warp has."""
    dtype, precision = numbers
    layout, values, *_ = drawn_case(rng, "forward", WIDTH, dtype)
    batch = int(rng.choice([33, 41, 49, 63]))
    x, dy = (rng.standard_normal((batch, n)).astype(values.dtype) for n in (3 * WIDTH, 4 * WIDTH))
    check_weight_grad(x, dy, layout, values, memories, precision)


@pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("rows", [9, 33])
@pytest.mark.parametrize(("dtype", "B"), [("float32", 32), ("float32", 8), ("float16", 8)])
def test_infinity_and_nan_are_of_their_row_and_their_blocks_alone(dtype, B, rows, rng):
    """Where a float32 is split, sums that are NaN are computed again: those that are there. A block
    that a step lacks has no values of the first line."""
    layout, values, n_in, n_out = drawn_case(rng, "forward", B, dtype)
    x = rng.standard_normal((rows, n_in)).astype(dtype)
    x[3, n_in - 1], x[7, 0], x[min(rows, 32) - 1, 1] = np.inf, np.nan, np.nan
    check(rung, "forward", x, values, layout, n_out, "feature-major", "feature-major")


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_features_of_a_weight_without_blocks_are_no_slabs(dtype):
    """No copy engine loads these, and a tile of 16 rows is none that lanes copy."""
    layout, rows = Layout(np.zeros((2, 1), bool)), 16 // as_dtype(dtype).itemsize
    w = BlockSparse(to_device(np.zeros((0, WIDTH, WIDTH), as_dtype(dtype))), layout)
    x = to_device(np.ones((2 * WIDTH, rows), as_dtype(dtype)))
    y = to_device(np.full((WIDTH, rows), np.nan, as_dtype(dtype)))
    ops.matmul(w.T, x, out=y, kernel="k8_small_batch")
    np.testing.assert_array_equal(y.numpy().astype(np.float64), 0)


@pytest.mark.skipif(not SIMULATED, reason="counts what is computed again")
@pytest.mark.parametrize("rows", [2, 7, 11, 21])
@pytest.mark.parametrize("B", [8, 32])
def test_what_is_behind_a_slab_is_not_computed_again(B, rows, rng, monkeypatch):
    """Rows beyond the last one read what was in shared memory before, which may be NaN."""
    repaired = []

    def counting(sums):
        return lambda *where: repaired.append(where)

    for made in (lines.line_kernel, lines.finishing):
        monkeypatch.setattr(lines, made.__name__, made.__wrapped__)
    monkeypatch.setattr(launch, "line_kernel", lines.line_kernel)
    monkeypatch.setattr(lines, "repairing", counting)
    layout, values, *_ = drawn_case(rng, "forward", B, "float32")
    n_in, n_out = (B * n for n in layout.shape)
    x = rng.standard_normal((rows, n_in)).astype("float32")
    check(rung, "forward", x, values, layout, n_out, "feature-major", "feature-major")
    assert not repaired


@pytest.mark.pairs
@pytest.mark.parametrize("many", [False, True], ids=["few steps", "many steps"])
@pytest.mark.parametrize("batch", [17, 45, 70])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("B", [8, 16])
def test_factors_are_read_from_16_bytes_on(B, dtype, batch, many, rng, copies, monkeypatch):
    """By lanes, in steps of 32 rows, where a warp has few; what is behind the last row is 0."""
    monkeypatch.setattr(launch, "ALONG", 0 if many else 99)
    layout, values, *_ = drawn_case(rng, "forward", B, dtype)
    x, dy = (rng.standard_normal((batch, B * n)).astype(values.dtype) for n in layout.shape)
    check_weight_grad(x, dy, layout, values, ("feature-major",) * 2, "highest")
    assert len(copies) == (2 if many else 0)


@pytest.mark.parametrize(("dtype", "rows"), [("float16", 7), ("bfloat16", 31), ("float32", 15)])
@pytest.mark.parametrize("memory", MEMORIES)
def test_short_results_without_gaps_are_slabs(memory, dtype, rows):
    y = placed(np.zeros((rows, 2 * WIDTH), as_dtype(dtype)), memory)[0]
    form, x = rung._form(y, "highest"), Operand(True, 2 if rows <= 16 else 4, slab=4)
    wide = placed(np.zeros((3 * WIDTH + 1, 2 * WIDTH), as_dtype(dtype)), memory)[0]
    order = store_lines.order_of_sums(y, form, x, WIDTH, True)
    assert (order == SLABS) == (memory == "feature-major")
    assert store_lines.order_of_sums(wide, form, x, WIDTH, True) != SLABS
