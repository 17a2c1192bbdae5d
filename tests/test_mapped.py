"""What a map says of ours alone: made-up times with known cliffs, a roofline by hand."""

import pytest

from numbsparse.bench.contestants import OURS
from numbsparse.bench.plane import Point, known
from numbsparse.pages import mapped
from numbsparse.pages.committed import RESULTS

POINT = Point((512, 1024), 32, 0.25, 64, "float16", "highest", "forward")
RATES = {
    "device memory, read": 1e13,
    "L2 cache, read (17 MB)": 2e13,
    "wgmma float16, operands in shared memory": 1e15,
}
KEPT = 512 * 1024 // 4
MET = 512 * (1 - 0.75**32)  # features of x that random blocks meet


def row(point, microseconds):
    return {**point._asdict(), "rung": "k8", "microseconds": {OURS: microseconds}, "faults": {}}


def test_cliffs_are_of_one_product_in_the_order_of_its_batches():
    other = POINT._replace(product="input_grad", batch=65)
    took = {POINT._replace(batch=65): 3.0, POINT: 2.0, other: 1.0, POINT._replace(batch=96): 1.5}
    assert sorted(mapped.changes(took)) == [
        (0.5, POINT._replace(batch=65), 96),
        (0.75, POINT, 96),
        (1.5, POINT, 65),
    ]


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({}, 2 * (64 * 1536 + KEPT) / 2e13),  # each number once, from the L2 cache
        # From memory: 100 MB; of few blocks no more features than random ones meet.
        ({"batch": 2**15}, 2 * (2**15 * (1024 + MET) + KEPT) / 1e13),
        (
            {"batch": 2**15, "density": 1 / 16, "product": "weight_grad"},
            2
            * (2**15 * (512 * (1 - (15 / 16) ** 32) + 1024 * (1 - (15 / 16) ** 16)) + KEPT / 4)
            / 1e13,
        ),
        ({"features": (16384, 4096), "batch": 512}, 2 * 512 * 2**24 / 1e15),  # wgmma
        ({"features": (16384, 4096), "batch": 512, "block_size": 8}, 512 * 2**21 * 2 * 32 / 1e15),
        (
            {"features": (16384, 4096), "batch": 512, "dtype": "float32"},
            6 * 2 * 512 * 2**24 / 1e15,
        ),
        (
            {"features": (16384, 4096), "batch": 1024, "dtype": "float32", "precision": "high"},
            2 * 2 * 1024 * 2**24 / 1e15,
        ),
    ],
    ids=str,
)
def test_a_roofline_is_a_launch_and_the_longest_of_the_limits(change, seconds):
    point = POINT._replace(**change)
    assert mapped.roofline(point, 3e-6, RATES) == pytest.approx(3e-6 + seconds)


def test_the_summary_names_cliffs_and_what_is_far_from_its_roofline(monkeypatch):
    monkeypatch.setattr(mapped, "limits", lambda: RATES)
    rows = [row(POINT._replace(batch=batch), us) for batch, us in ((64, 2), (65, 3), (96, 1.5))]
    rows.append(row(POINT._replace(density=0.5, batch=1), 20))
    rows.append({**rows[0], "batch": 128, "microseconds": {"cuBLAS dense": 3.0}})  # not ours
    lines = mapped.summary(rows, most=1).splitlines()
    assert lines[0] == "time falls below 0.9 with more rows at 2 of 3 pairs"
    assert lines[1].startswith("  0.50 at 96 rows: (512, 1024) 32 0.25 65 float16")
    assert lines[2] == "one row more takes over 1.3 times as long at 1 of 1"
    assert lines[3].startswith("  1.50 at 65 rows: (512, 1024) 32 0.25 64 float16")
    assert lines[4].startswith("float16 highest, B = 32: median 1.64 times the roofline")
    assert lines[4].endswith("more than 3 at 1 of 4")
    assert len(lines) == 5
    assert mapped.summary([]) == ""


def test_the_committed_map_is_not_far_below_its_roofline():
    _, rows = known("cuda", RESULTS / "plane_cuda.json")
    assert "B = 64: median" in mapped.summary(rows)
    took = {plane_point: 1e-6 * us for plane_point, us in _ours(rows)}
    assert min(mapped.times_the_roofline(took).values()) > 0.6


def _ours(rows):
    for each in rows:
        if OURS in each["microseconds"]:
            yield mapped.point_of(each), each["microseconds"][OURS]
