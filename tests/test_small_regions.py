"""Weight-gradients of k7_small_blocks: regions of blocks, cut, shared, and of two sizes."""

import numpy as np
import pytest

from numbsparse import device, patterns
from numbsparse.kernels.matmul import rung
from numbsparse.kernels.matmul.k7_small_blocks import region_plan, regions
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import Region, Way, cuts_of
from numbsparse.kernels.matmul.k7_small_blocks.region_slots import plan_regions
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE
from numbsparse.layout import Layout
from numbsparse.testing import Case, check_rung

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


def uneven(rng, B):
    """Hubs among the columns, an empty panel of rows, and edges inside a group of features."""
    pattern = rng.random((700 // B, 1100 // B)) < rng.random(1100 // B) ** 4
    pattern[64 // B : 200 // B] = False
    return Layout(pattern)


@pytest.mark.parametrize("B", [8, 16])
def test_every_block_is_in_one_slot_where_its_features_are(rng, B):
    layout, region = uneven(rng, B), Region(3, 96 // B, 4, 32, 2)
    groups, codes, used, blocks = plan_regions(layout.index, B, layout.shape, region)
    groups, used = groups.reshape(-1, region.GROUPS), used.reshape(-1, region.WARPS)
    shape = (groups.shape[0], region.WARPS, region.SLOTS)
    codes, blocks = codes.reshape(shape), blocks.reshape(*shape, 2)

    def feature(item, piece, of_dy):
        group, at = divmod(int(piece) * PIECE, region.FEATURES)
        group = groups[item, group]
        assert group >= 0
        assert group % 2 == of_dy
        return group // 2 * region.FEATURES + at

    found = []
    for item, warp, slot in np.ndindex(shape):
        assert (blocks[item, warp, slot, 0] >= 0) == (slot < used[item, warp])
        code = int(codes[item, warp, slot])
        for half, block in enumerate(blocks[item, warp, slot]):
            if block >= 0:
                row = feature(item, code >> 10 * half & 1023, False)
                column = feature(item, code >> 20 & 1023, True)
                found.append((row // B, column // B, block))
                same = slot > 0 and code >> 20 & 1023 == codes[item, warp, slot - 1] >> 20 & 1023
                assert code >> 30 == (not same)
    places = layout.index.block_rows, layout.index.block_columns
    kept = zip(*places, range(layout.n_blocks), strict=True)
    assert sorted(found) == sorted(kept)


@pytest.mark.parametrize("pieces", [2, pytest.param(11, id="11, which warps share")])
@pytest.mark.parametrize(("dtype", "B"), [("bfloat16", 8), ("float16", 16), ("float32", 8)])
def test_sums_of_regions_that_are_cut(dtype, B, pieces, monkeypatch):
    cut_of = []
    monkeypatch.setattr(
        regions,
        "region_for",
        lambda index, B, widths, batch, ways, places: (ways[0].region, pieces),
    )
    monkeypatch.setattr(regions, "cuts_of", lambda *of: cut_of.append(cuts_of(*of)) or cut_of[-1])
    case = Case(batch=33 * pieces, in_features=40, out_features=60, block_size=B, density=0.3)
    check_rung(rung("k7_small_blocks"), "weight_grad", case, dtype, "cuda")
    assert any(cuts.left for cuts in cut_of)


@pytest.mark.parametrize("slots", [2, 6])
@pytest.mark.parametrize(("dtype", "B"), [("bfloat16", 8), ("float16", 16), ("float32", 8)])
def test_sums_of_regions_that_a_cluster_shares(dtype, B, slots, monkeypatch):
    def shared(index, B, widths, batch, ways, places):
        return ways[0].region._replace(SLOTS=slots, SPLIT=4), 1

    monkeypatch.setattr(regions, "region_for", shared)
    case = Case(batch=83, in_features=43, out_features=60, block_size=B, density=0.3)
    check_rung(rung("k7_small_blocks"), "weight_grad", case, dtype, "cuda")


def test_regions_are_cut_where_that_pays():
    large = Region(12, 18, 38, 32, 3)

    def pieces(n, batch, a_row=0.05):
        ways = (Way(large, a_row),)
        return region_plan.fastest(lambda _: (n, 1, 1), 8, batch, ways, 132)[1]

    assert pieces(50, 64) == 1
    assert pieces(50, 2048) > 1
    assert pieces(132, 8192) == 1
    assert pieces(1, 40, a_row=5.0) == 2  # a stage each


@pytest.mark.parametrize(
    ("B", "item", "of_images", "pieces"),
    [(8, 4, False, 1), (16, 4, False, 3), (16, 4, True, 1), (16, 2, False, 1)],
)
def test_large_regions_of_blocks_of_16_are_cut_for_less(B, item, of_images, pieces):
    """Of matrices, as images were not timed, and most of float32."""
    large = Region(12, 18 if B == 8 else 9, 38, 32, 3, ITEM=item)
    arithmetic = "highest" if item == 4 else "float16"
    way, *_ = region_plan.ways_for(0.1, B, arithmetic, False, of_images)
    ways = (way._replace(region=large, a_row=0.05),)
    found = region_plan.fastest(lambda _: (88, 1, 1), B, 1000, ways, 132)
    assert found == (large, pieces)


@pytest.mark.parametrize(
    ("batch", "places", "which", "blocks"),
    [
        *((64, 132, 4, 1), (500, 132, 3, 4), (4096, 132, 2, 8)),
        *((64, 13, 3, 1), (64, 10, 1, 1), (64, 4, 0, 1)),
    ],
)
def test_regions_are_small_where_large_ones_leave_places_free(
    batch, places, which, blocks, monkeypatch
):
    monkeypatch.setattr(region_plan, "shared_memory", lambda: 227 * 1024)
    index = Layout(patterns.random(128, 128, 0.1, seed=0)).index
    monkeypatch.setattr(region_plan, "SIMULATED", False)
    ways = region_plan.ways_for(0.1, 8, "float16", False)
    region, pieces = region_plan.region_for(index, 8, (1024, 1024), batch, ways, places)
    assert region == ways[which].region._replace(SPLIT=blocks)
    assert pieces == 1


@pytest.mark.parametrize(("places", "blocks"), [(2, 2), (1, 1)])
def test_large_regions_are_of_clusters_where_each_has_two_places(places, blocks, monkeypatch):
    """Instead of pieces whose sums meet in memory; none where nothing is kept, either."""
    monkeypatch.setattr(region_plan, "shared_memory", lambda: 227 * 1024)
    large = region_plan.region_of(8, 2, 0.1, False)

    def found(n, together):
        ways = (Way(large, 0.04, together=together),)
        return region_plan.fastest(lambda _: (n, 1, 1), 8, 2048, ways, places * 5)

    assert found(0, 2) == (large, 1)
    assert found(5, 2) == (large._replace(SPLIT=blocks), 1)
    assert found(5, 1) == (large, places)


@pytest.mark.parametrize("batch", [1023, 1 << 14, 1 << 17])
@pytest.mark.parametrize(("B", "item"), [(8, 2), (16, 2), (8, 4), (16, 4)])
def test_few_regions_of_many_rows_are_cut_into_pieces(batch, B, item, monkeypatch):
    """As many as there are places for, if rows are many; a second pass is worth no few rows."""
    monkeypatch.setattr(region_plan, "shared_memory", lambda: 227 * 1024)
    index = Layout(patterns.random(128 // B, 128 // B, 0.2, seed=0)).index
    monkeypatch.setattr(region_plan, "SIMULATED", False)
    ways = region_plan.ways_for(0.2, B, "highest" if item == 4 else "float16", False)
    slower, where = 0.1 / ways[0].a_row, (index, B, (128, 128), batch)
    first, *smaller = (way._replace(a_row=way.a_row * slower) for way in ways)
    region, pieces = region_plan.region_for(*where, (first, *smaller), 132)
    n, *_ = region_plan.size_of(index, B, (128, 128), region)
    assert region in [each.region._replace(SPLIT=region.SPLIT) for each in smaller]
    assert n * pieces * region.SPLIT <= 132
    assert (region.SPLIT, pieces > 1) == ((8, False) if batch == 1023 else (1, True))
    assert batch < 1 << 17 or pieces > 64
    fewer = [each._replace(spare=6) for each in smaller]
    region, pieces = region_plan.region_for(*where, (first, *fewer), 132)
    n, *_ = region_plan.size_of(index, B, (128, 128), region)
    assert region.SPLIT > 1 or n * pieces <= 126


@pytest.mark.parametrize("places", range(2, 12))
def test_wider_regions_where_they_save_a_round(places, monkeypatch):
    monkeypatch.setattr(region_plan, "shared_memory", lambda: 227 * 1024)
    index = Layout(patterns.random(192, 192, 0.1, seed=0)).index
    large = region_plan.region_of(8, 2, 0.1, False)
    wider = region_plan.WIDER[large]
    n, m = (region_plan.size_of(index, 8, (1536, 1536), of)[0] for of in (large, wider))
    fewer = -(-n * 12 * 18 // (14 * 17))  # without planning these
    assert m <= fewer <= n
    ways, saves = (Way(large, 0.04),), -(-fewer // places) < -(-n // places)
    found, _ = region_plan.region_for(index, 8, (1536, 1536), 64, ways, places)
    assert found == (wider if saves else large)


@pytest.mark.parametrize(("n", "pieces", "left"), [(11, 3, 3), (11, 1, 0), (8, 3, 0), (2, 5, 2)])
def test_regions_that_places_lack_are_cut(n, pieces, left):
    assert cuts_of(n, 4, pieces) == (n - left, left, pieces)
