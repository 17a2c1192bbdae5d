"""k7_small_blocks where a layout takes several strips, stages and passes."""

from functools import partial

import numpy as np
import pytest

from numbsparse import BlockSparse, device, ops, patterns
from numbsparse.device import to_device
from numbsparse.kernels.conv import k6_strips
from numbsparse.kernels.matmul import PRODUCTS, reach, rung
from numbsparse.kernels.matmul.k7_small_blocks import strip_plan, strips
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE, plan_strips
from numbsparse.kernels.parts import aligned
from numbsparse.kernels.parts.deal import cut_into_stages
from numbsparse.kernels.parts.pixels import Shared
from numbsparse.kernels.parts.strip import Strip
from numbsparse.layout import Layout
from numbsparse.testing import Case, check_rung, races

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


CASES = [
    Case(batch=3, in_features=300, out_features=40, block_size=16, density=0.9),
    Case(batch=3, in_features=290, out_features=36, block_size=8, density=0.5),
    Case(batch=66, in_features=40, out_features=60, block_size=8, density=0.2),
]


@pytest.mark.every(2)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product, case):
    check_rung(rung("k7_small_blocks"), product, case, "float16", "cuda")


# Strips that are all but full, or they are uneven.
IN_A_CLUSTER = [Case(130, 1530, 2040, 8, 0.03), Case(130, 1530, 2040, 16, 0.1)]
if device.SIMULATED:  # where strips are narrower
    IN_A_CLUSTER = [Case(3, 300, 260, 8, 0.05), Case(3, 300, 260, 16, 0.15)]


@pytest.mark.pairs
@pytest.mark.parametrize("case", IN_A_CLUSTER, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_products_of_strips_in_a_cluster(product, dtype, case, monkeypatch):
    def widest(sizes, B, item, *_):
        return strip_plan.warps_for(sizes[2], item), 1, 64

    monkeypatch.setattr(strip_plan, "shared_out", widest)
    monkeypatch.setattr(strip_plan, "PAIRED_FROM", 0)
    monkeypatch.setattr(strip_plan, "PAIRED_STRIPS", 2)
    monkeypatch.setattr(strip_plan, "PAIRED_KEPT", 1.0)
    index, transposed = case.layout(np.random.default_rng(0)).index, product == "input_grad"
    features = (case.in_features, case.out_features)[:: -1 if transposed else 1]
    sizes = case.batch, *features
    strip = strip_plan.strip_of(index, case.block_size, 2, transposed, sizes)
    assert strip.PACKED
    assert strip.CLUSTER == 2
    gated = strip_plan.strip_of(index, case.block_size, 2, transposed, sizes, "mixed")
    assert (2 if case.block_size == 16 else 1) == gated.CLUSTER
    check_rung(rung("k7_small_blocks"), product, case, dtype, "cuda")
    few = 2 * case.batch * features[0]
    (most,) = strip_plan.uneven(index, transposed, 32 * strip.WARPS // case.block_size)
    many = -(-features[1] // 32) + 2
    density = index.block_rows.size * case.block_size**2 / (features[0] * features[1])
    density *= 0.999  # a product of it may be rounded up
    names = "PAIRED_FROM", "PAIRED_STRIPS", "PAIRED_KEPT", "UNEVEN"
    edges = (few + 1, 2, 1, 99), (few, many, 1, 99), (few, 2, density, 99), (few, 2, 1, most)
    for limits in edges:
        for name, limit in zip(names, limits, strict=True):
            monkeypatch.setattr(strip_plan, name, limit)
        assert strip_plan.strip_of(index, case.block_size, 2, transposed, sizes).CLUSTER == 1


def test_strips_are_as_uneven_as_their_blocks():
    kept = [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]]
    index = Layout(np.array(kept, bool)).index
    assert strip_plan.uneven(index, False, 2) == (6 / 4,)
    assert strip_plan.uneven(index, False, 4) == (8 / 6,)
    assert strip_plan.uneven(index, True, 1) == (6 / 4,)


@pytest.mark.parametrize("density", [0.01, 0.02, 0.05])
def test_stages_have_room_for_steps_of_one_block(density, rng, monkeypatch):
    """Of two blocks of 8 a step has one alone where a column's number of them is odd."""
    monkeypatch.setattr(strip_plan, "SIMULATED", False)
    monkeypatch.setattr(strip_plan, "shared_memory", lambda: 227 * 1024)
    base = strip_plan.Strip(8, 64, 16, 64, 0, 0, 3, 1, 4, 2, 1, True, "", False)
    columns = base.WARPS * base.COLUMNS
    each = base.WIDTH // 8 * density  # blocks of a column in a group
    strip, _ = strip_plan.fitted(base, columns * each / 2, 1, True)
    blocks = rng.poisson(strip.GROUPS * each, (500, columns))
    assert 1.1 * (-(-blocks // 2)).sum(1).mean() <= strip.STEPS


@pytest.mark.parametrize(
    ("dtype", "B"), [("float16", 8), ("bfloat16", 16), ("float32", 8), ("float32", 16)]
)
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_w_in_the_order_of_its_steps(dtype, B, product, monkeypatch):
    monkeypatch.setattr(strip_plan, "PACK_FROM", 0)
    monkeypatch.setattr(strip_plan, "PACK_MUCH", {8: 0, 16: 0})
    monkeypatch.setattr(strip_plan, "PACK_FLOAT32_FROM", 0)
    case = Case(batch=5, in_features=60, out_features=44, block_size=B, density=0.6)
    check_rung(rung("k7_small_blocks"), product, case, dtype, "cuda")


@pytest.mark.pairs
@pytest.mark.parametrize(("warps", "split", "rows"), [(4, 2, 64), (2, 4, 48), (1, 3, 16)])
@pytest.mark.parametrize("product", ["forward", "input_grad"])
@pytest.mark.parametrize("feature_major", [False, True], ids=["rows", "features"])
@pytest.mark.parametrize(("dtype", "B"), [("float16", 8), ("bfloat16", 16), ("float32", 8)])
def test_sums_that_a_cluster_shares(
    dtype, B, feature_major, product, warps, split, rows, monkeypatch
):
    """A part may have no stage at all, and the last rows and columns are not there."""
    rows = rows if not feature_major else 64
    monkeypatch.setattr(strip_plan, "shared_out", lambda *sizes: (warps, split, rows))
    batch = 70 if warps == 4 else 9
    case = Case(batch, in_features=157, out_features=45, block_size=B, density=0.4)
    check_rung(rung("k7_small_blocks"), product, case, dtype, "cuda", feature_major=feature_major)


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_that_a_cluster_shares_have_no_races(dtype, monkeypatch):
    """As its blocks meet before they write where lanes copied w to: a sanitizer does not see that
    this orders them."""
    monkeypatch.setattr(strip_plan, "shared_out", lambda *sizes: (1, 2, 64))
    case = Case(9, in_features=320, out_features=30, block_size=8, density=0.7)
    run = partial(check_rung, rung("k7_small_blocks"), "forward", case, dtype, "cuda")
    assert races(run) == []
    monkeypatch.setattr(strips, "freed", lambda strip, lengths: strip._replace(FREE=True))
    written = [race.others_at for race in races(run) if race.of_another_block and race.others_write]
    assert any(place.startswith("stored_blocks") for place in written)


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
def test_tiles_of_the_batch_have_as_many_rows_each(monkeypatch):
    """So none begins where another one stores."""
    boxes, box_of = [], strips.box_of

    def remember(rows, *of):
        boxes.append(rows)
        return box_of(rows, *of)

    monkeypatch.setattr(strips, "box_of", remember)
    monkeypatch.setattr(strip_plan, "shared_out", lambda *sizes: (1, 1, 64))
    case = Case(batch=66, in_features=32, out_features=16, block_size=16, density=1.0)
    run = partial(check_rung, rung("k7_small_blocks"), "forward", case, "float16", "cuda")
    assert races(run) == []
    assert boxes == [33]


def test_feature_major_activations_that_are_copied_have_even_tiles(rng, monkeypatch):
    boxes, box_of = [], strips.box_of

    def remember(rows, width, transposed):
        boxes.append((rows, transposed))
        return box_of(rows, width, transposed)

    monkeypatch.setattr(strips, "box_of", remember)
    layout = Layout(rng.random((4, 3)) < 0.7)
    values = rng.integers(-4, 5, (layout.n_blocks, 8, 8)).astype(np.float16)
    w = BlockSparse(values, layout)
    for batch in (33, 40):
        x = rng.integers(-4, 5, (24, batch)).astype(np.float16)
        y = ops.matmul(w.to("cuda"), to_device(x), kernel="k7_small_blocks")
        np.testing.assert_array_equal(y.numpy(), w.toarray() @ x)
        rows, transposed = boxes.pop()
        assert transposed == (batch == 40)
        tiles = -(-batch // rows)
        assert (rows == -(-batch // tiles)) == (batch == 33)


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("B", [8, 16])
def test_parts_of_sums_all_run_at_once(B, item, rng, monkeypatch):
    monkeypatch.setattr(strip_plan, "multiprocessors", lambda: 132)
    shared = 0
    for _ in range(100):
        batch, features, columns = (int(2 ** rng.uniform(*of)) for of in ((0, 14), *2 * [(4, 15)]))
        n_blocks = int(rng.uniform() * features * columns / B**2) + 1
        sizes = batch, features, columns
        even = batch % 2 > 0
        warps, split, rows = strip_plan.shared_out(sizes, B, item, n_blocks, 132, even)
        is_dense = (B, item) == (16, 2) and n_blocks * B**2 > 0.19 * features * columns
        most = strip_plan.HIGH if is_dense else 80
        assert rows == 64 or (
            even and rows % 16 == 0 and rows <= most and (rows < 64 or warps <= 8)
        )
        tiles = -(-columns // (32 * warps)) * -(-batch // rows)
        assert split == 1 or tiles * split <= 132 * strip_plan.COSTS[item, B].room[split - 2]
        widest = strip_plan.warps_for(columns, item)
        whole = -(-columns // (32 * widest)) * -(-batch // 64)  # tiles of the widest
        many = whole >= (16 if even and item == 4 else 2) * 132
        assert not many or (warps, split, rows) == (widest, 1, 64)
        shared += split > 1
    assert 10 < shared < 90


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("B", [8, 16])
def test_layouts_share_kernels(B, item, rng, monkeypatch):
    limit = 227 * 1024
    monkeypatch.setattr(strip_plan, "SIMULATED", False)
    monkeypatch.setattr(strip_plan, "multiprocessors", lambda: 132)
    monkeypatch.setattr(strip_plan, "shared_memory", lambda: limit)
    strips, layouts = set(), 30
    for _ in range(layouts):
        rows, columns = (int(2 ** rng.uniform(9, 12)) // B for _ in range(2))
        index = Layout(patterns.random(rows, columns, 2 ** rng.uniform(-6, -1), seed=0)).index
        for batch in (64, 128, 512):
            sizes = batch, rows * B, columns * B
            strip = strip_plan.strip_of(index, B, item, False, sizes)
            assert limit - 1024 >= strip.SHARED_BYTES
            assert strip.STAGES >= 3
            if strip.SPLIT > 1 or strip_plan.warps_for(columns * B, item) > strip.WARPS:
                strips.add(strip)
    assert len(strips) <= layouts


def test_a_column_has_no_more_steps_in_a_stage_than_its_bits_count():
    counts, n = np.full((1, 4, 2), [72, 1], np.uint8), 4  # blocks of 4 groups, two in a step
    stages, places = np.empty((2, 1, n), np.int32)
    groups, blocks = np.full((n + 1, 4), -1, np.int32), np.zeros((n + 1, 2), np.int32)
    firsts = cut_into_stages(counts, 1, 4, 256, 2, 1, blocks, stages, places, groups)
    assert firsts.tolist() == [0, 4]
    assert blocks[:4, 0].tolist() == [72] * 4


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("B", [8, 16])
def test_strips_of_pixels_fit_a_multiprocessor(B, item, rng, monkeypatch):
    """One block of threads, or two; and the places of pixels in a stage 16 bits."""
    monkeypatch.setattr(strip_plan, "SIMULATED", False)
    monkeypatch.setattr(k6_strips, "multiprocessors", lambda: 132)
    monkeypatch.setattr(strip_plan, "shared_memory", lambda: 227 * 1024)
    beside = set()
    for _ in range(60):
        pixels, columns, shifts = 8 * int(rng.integers(8, 26)), 32 * int(rng.integers(1, 9)), 32
        pixels = 128 if rng.random() < 0.3 else pixels
        rows = 64 * shifts // B * int(rng.integers(1, 8))
        pattern = patterns.random(rows, columns // B, 2 ** rng.uniform(-11, -4), seed=0)
        sizes = int(64 * rng.integers(67, 400)), rows * B * pixels // shifts // 64, columns
        shared = Shared(128 // item, pixels, shifts)
        index = Layout(pattern).index
        if not k6_strips.has_steps(index, B, item, False, columns, shared):
            continue
        strip = k6_strips.strip_of_images(index, B, item, False, sizes, 128 // item, shared)
        assert strip.BESIDE * (strip.SHARED_BYTES + 2048) <= 229 * 1024
        assert strip.STAGES > 1
        assert strip.GROUPS * strip.GROUP_BYTES < 2**16
        beside.add((strip.BESIDE, strip.WARPS <= 4 and sizes[0] // 64 > 132))
    assert {(2, True), (1, False)} <= beside <= {(2, True), (1, True), (1, False)}


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("B", [8, 16])
def test_strips_without_blocks_between_others(rng, B, dtype):
    wide, tall = (400 // B, 9) if device.SIMULATED else (4096 // B, 64 * 140)
    pattern = rng.random((48 // B, wide)) < 0.4
    pattern[:, wide // 5 : 7 * wide // 10] = False  # more than a strip
    layout, eps = Layout(pattern), np.finfo(dtype).eps
    x = rng.standard_normal((tall, 48)).astype(dtype)
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(dtype)
    y = device.to_device(device.memory.hole((tall, wide * B), dtype))
    there = device.to_device(x), device.to_device(values), ops.index_beside(layout, y)
    rung("k7_small_blocks").forward(*there, y)
    expected = np.empty(y.shape)
    exact = (a.astype(np.float64) for a in (x, values))
    rung("k0_reference").forward(*exact, layout.index, expected)
    np.testing.assert_allclose(y.numpy(), expected, rtol=eps, atol=48 * 2**-18)


FEATURE_MAJOR = [
    Case(5, in_features=43, out_features=30, block_size=8, density=0),
    Case(5, in_features=43, out_features=140, block_size=8, density=0.5),
    Case(72, in_features=300, out_features=40, block_size=16, density=0.6),
    Case(66, in_features=150, out_features=36, block_size=8, density=0.1),
]


@pytest.mark.parametrize(
    ("product", "case"),
    [
        (product, case)
        for n, product in enumerate(PRODUCTS)
        for m, case in enumerate(FEATURE_MAJOR)
        if not device.SIMULATED or n == 2 or (n + m) % 2  # of lines each case once
    ],
    ids=str,
)
def test_products_of_feature_major_activations(product, case, monkeypatch):
    monkeypatch.setattr(aligned, "copy_matrices", None)  # they are read as they are
    check_rung(rung("k7_small_blocks"), product, case, "float16", "cuda", feature_major=True)


@pytest.mark.pairs
@pytest.mark.parametrize("x_transposed", [False, True], ids=["x", "x.T"])
@pytest.mark.parametrize("dy_transposed", [False, True], ids=["dy", "dy.T"])
@pytest.mark.parametrize(("B", "density"), [(8, 0.5), (8, 0.1), (16, 0.5), (16, 0.1)])
def test_weight_grad_of_either_order(rng, B, density, x_transposed, dy_transposed):
    layout = Case(48, 7 * 16, 9 * 16, B, density).layout(rng)
    x, dy = (rng.standard_normal((48, n * B), np.float32) for n in layout.shape)
    x, dy = x.astype(np.float16), dy.astype(np.float16)
    there = [
        device.to_device(np.ascontiguousarray(a.T)).T if transposed else device.to_device(a)
        for a, transposed in ((x, x_transposed), (dy, dy_transposed))
    ]
    out = device.to_device(device.memory.hole((layout.n_blocks, B, B), np.float16))
    rung("k7_small_blocks").weight_grad(*there, ops.index_beside(layout, out), out)
    expected = np.empty(out.shape)
    exact = (a.astype(np.float64) for a in (x, dy))
    rung("k0_reference").weight_grad(*exact, layout.index, expected)
    np.testing.assert_allclose(out.numpy(), expected, rtol=2**-10, atol=48 * 2**-20)


def uneven(rng, B):
    """Hubs among the columns, an empty panel of rows, and edges inside a group of features."""
    pattern = rng.random((700 // B, 1100 // B)) < rng.random(1100 // B) ** 4
    pattern[64 // B : 200 // B] = False
    return Layout(pattern)


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("B", [8, 16])
@pytest.mark.parametrize(("width", "cluster"), [(32, 1), (64, 2)])
def test_every_block_is_in_one_step_where_its_features_are(rng, B, transposed, width, cluster):
    layout, strip = uneven(rng, B), Strip(B, 64, 4, width, 4, width * 8 // B, 2, cluster)
    walk = layout.index.rows if transposed else layout.index.columns
    features = (layout.shape[1] if transposed else layout.shape[0]) * B - 3
    plan = plan_strips(layout.index, transposed, features, strip)
    lengths, words, codes, begins, groups, lines = plan
    lines = lines.reshape(-1, cluster, strip.WARPS, strip.COLUMNS)
    head = strip.HEAD
    groups, codes = groups.reshape(-1, strip.GROUPS), codes.reshape(-1, strip.BLOCKS_A_STEP)
    found = []
    for s, (first, n_stages) in enumerate(zip(lengths.starts, lengths.steps, strict=True)):
        for stage, rank in np.ndindex(n_stages, cluster):
            stage += first
            block = stage * cluster + rank
            begin, end = begins[block : block + 2]
            assert end - begin <= strip.STEPS
            told = words[begin + block * head :]
            for word, own in zip(told[: strip.WARPS], lines[s, rank], strict=True):
                step = begin + (int(word) >> 24)
                for j, line in enumerate(own):
                    for _ in range(int(word) >> 6 * j & 63):
                        for half in range(2):
                            code = codes[step, half * strip.BLOCKS_A_STEP // 2]
                            nth = half if B == 16 else 0  # piece of the block
                            inside = min(max((code & 31) - nth * PIECE, 0), PIECE)
                            piece = (code >> 5) * (B // PIECE) + nth
                            place = int(told[head + step - begin]) >> 16 * half & 0xFFFF
                            group, at = divmod(place, strip.GROUP_BYTES)
                            assert (inside == 0) == (group == strip.GROUPS)
                            if inside:
                                feature = groups[stage, group] * width + at // 2
                                assert inside == min(features - feature, PIECE)
                                found.append((line, feature // PIECE, piece))
                        step += 1
    line, pieces = np.repeat(np.arange(walk.indptr.size - 1), np.diff(walk.indptr)), B // PIECE
    kept = [
        (i, index * pieces + k, block * pieces + k)
        for i, index, block in zip(line, walk.indices, walk.blocks, strict=True)
        for k in range(pieces)
    ]
    assert sorted(found) == sorted(kept)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_it_takes_a_card_with_a_copy_engine(dtype, monkeypatch):
    unsupported = rung("k7_small_blocks").unsupported
    monkeypatch.setattr(reach, "SIMULATED", False)
    for here in ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(reach, "compute_capability", lambda here=here: here)
        reason = unsupported("forward", 8, np.dtype(dtype), "cuda")
        assert (reason is None) == (here >= (9, 0)), reason
