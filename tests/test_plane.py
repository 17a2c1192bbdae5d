"""The map of the plane: it goes on where it ended, and weighs us against the fastest peer."""

import csv
import json
import os
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from numbsparse.bench import measure, plane
from numbsparse.bench.contestants import CUBLAS, FEATURE_MAJOR, OURS, TRITON
from numbsparse.bench.measure import Case, compile_ahead
from numbsparse.bench.plane import VISIBLE, on_each
from numbsparse.bench.problem import Problem
from numbsparse.pages import mapped
from numbsparse.pages.figure import draw_map, draw_roofline

SMALL = plane.Plane(
    sizes=((32, 32), (64, 32)),
    batches=(1, 5),
    block_sizes=(8, 16),
    densities=(0.5,),
    numbers=(("float32", "highest"),),
    products=("forward", "weight_grad"),
    dense=None,
    beside=("NumPy dense", "SciPy BSR"),
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(plane.PLANES, "cpu", SMALL)
    monkeypatch.setitem(plane.SECONDS, "cpu", 0.0)
    monkeypatch.setattr(measure, "LEAST", 0.001)
    monkeypatch.setitem(mapped.TYPICAL, "cpu", 0.5)


def test_a_map_goes_on_where_its_file_ends(small, tmp_path, monkeypatch):
    file = tmp_path / "map.json"
    whole = plane.measured
    monkeypatch.setattr(plane, "measured", lambda *of: list(whole(*of))[:5])
    plane.run("cpu", file, 30)
    _, first = plane.known("cpu", file)
    assert len(first) == 5
    monkeypatch.setattr(plane, "measured", whole)
    plane.run("cpu", file, 30)
    machine, rows = plane.known("cpu", file)
    assert machine
    assert rows[:5] == first
    everything = set(plane.points("cpu"))
    assert len(rows) == len(everything) == 2 * 2 * 2 * 2
    assert {plane.point_of(row) for row in rows} == everything
    for row in rows:
        peers = {"NumPy dense"} | ({"SciPy BSR"} if row["product"] == "forward" else set())
        assert row["rung"] == "k0_cpu"
        assert row["microseconds"].keys() == {OURS} | peers
        assert not row["faults"]
    printed = mapped.beside_peers("cpu", rows)
    assert "16 products beside the fastest peer of each" in printed
    assert "B = 8, density 0.5" in printed
    took = [row["microseconds"] for row in rows if row["product"] == "forward"]
    middle = np.median([each["SciPy BSR"] / each[OURS] for each in took])
    assert f"at 0.5, float32 highest: median {middle:.2f} times SciPy BSR" in printed


def test_other_processes_compile_ahead(small, monkeypatch):
    compiled = []
    monkeypatch.setattr(measure, "compile_ahead", lambda *of: compiled.append(of))
    monkeypatch.setattr(plane, "AHEAD", 3)
    monkeypatch.setattr(measure, "MORE", 2)
    rows = list(plane.measured("cpu", [], 60.0, jobs=2))
    assert [len(cases) for cases, *_ in compiled] == [2, 4, 6, 4]
    assert [
        (case.problem.batch, case.problem.block_size, case.product)
        for cases, *_ in compiled
        for case in cases
    ] == [(row["batch"], row["block_size"], row["product"]) for row in rows]
    assert all(0 < seconds <= 60 for *_, seconds in compiled)
    assert list(plane.measured("cpu", rows, 60.0, jobs=2)) == []


def test_another_process_calls_what_will_be_timed(tmp_path):
    makes_a_file = partial(Path.touch, tmp_path / "called")  # in the place of a layout
    problem = Problem(makes_a_file, 8, 4, "float32", place="cpu")
    compile_ahead([Case(problem, "forward", "auto", (), {})], 1, np.inf)
    assert (tmp_path / "called").exists()


def test_each_call_counts(monkeypatch):
    """Those that fail too."""
    done = get_context("spawn").Value("i", 0)
    measure._call_each([Case(Problem(list, 8, 4, "float32"), "forward")] * 3, done)
    assert done.value == 3


def test_calls_that_share_kernels_are_one_process_s(monkeypatch):
    parts = []

    def process(target, args, daemon):
        parts.append([(case.kernels, case.problem.dtype, case.problem.batch) for case in args[0]])
        return SimpleNamespace(start=list, is_alive=lambda: False, kill=list)

    context = SimpleNamespace(Process=process, Value=lambda *_: None)
    monkeypatch.setattr(measure, "get_context", lambda _: context)
    of = [("k6", "float32", 1), ("k5", "float16", 2), ("k6", "float32", 3), ("k5", "float16", 4)]
    monkeypatch.setattr(measure, "named", lambda problem, product, kernels: kernels.split(","))
    cases = [
        Case(Problem(list, 8, batch, dtype), "forward", kernels, (), {})
        for kernels, dtype, batch in of
    ]
    compile_ahead([*cases, cases[0]], 2, 1.0)
    assert parts == [[of[3], of[1]], [of[2], of[0]]]  # each begins with its last
    compile_ahead(cases, 1, 1.0)
    assert parts[2] == [of[2], of[3], of[0], of[1]]
    both = cases[0]._replace(kernels="k5,k6", others=(TRITON, FEATURE_MAJOR))
    first, second = measure._apart([both])  # each rung by itself, and torch's once
    assert (first.kernels, second.kernels) == ("k5", "k6")
    assert (first.others, second.others) == ((TRITON, FEATURE_MAJOR), (FEATURE_MAJOR,))


def test_the_dense_product_is_timed_without_ours():
    first, second = islice(plane.points("cuda"), 2)
    assert first.dense == second
    assert first.case("cuda")[2:4] == ("auto", (TRITON,))
    assert second.case("cuda")[2:4] == ("", (CUBLAS,))
    assert second.case("cuda").problem.layout.density == 1


def test_a_run_says_how_far_it_is(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plane, "SAVED", 0.0)
    plane.run("cpu", None, 30)
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{n} products" for n in range(1, 17)]


def test_a_map_stops_in_time(small):
    assert list(plane.measured("cpu", [], -1.0)) == []


def test_maps_are_joined(small, tmp_path):
    """A map takes what it lacks of others, of the same processor and of the same rungs."""
    plane.run("cpu", tmp_path / "whole.json", 30)
    content = json.loads((tmp_path / "whole.json").read_text())
    rows = content["rows"]

    def write(name, **changes):
        (tmp_path / name).write_text(json.dumps(content | changes))
        return tmp_path / name

    other = [[*each[:-2], {OURS: 7.0}, {}] for each in rows]
    first, second = write("first.json", rows=rows[:6]), write("second.json", rows=other[3:9])
    machine, joined = plane.run("cpu", first, 0, join=[second, write("third.json", rows=other)])
    assert [list(row.values()) for row in joined] == rows[:6] + other[6:]
    assert plane.known("cpu", first) == (machine, joined)
    assert len(plane.known("cpu", second)[1]) == 6
    newer = write("newer.json", machine=f"{plane.card_of(machine)}; later versions")
    assert len(plane.run("cpu", None, 0, join=[newer])[1]) == len(rows)
    with pytest.raises(ValueError, match=r"of\.json is of a card, this map of "):
        plane.run("cpu", first, 0, join=[write("of.json", machine="a card; versions")])
    with pytest.raises(ValueError, match=r"none\.json holds no map to join"):
        plane.run("cpu", first, 5, join=[tmp_path / "none.json"])
    forced = write("forced.json", command=f"{content['command']} --kernels k1_naive")
    with pytest.raises(ValueError, match=r"another map than .* cpu`: of .* --kernels k1_naive`"):
        plane.run("cpu", first, 0, join=[forced])


def test_the_fastest_of_some_rungs_is_ours(monkeypatch):
    """Those that serve not, or are wrong, are none of them."""
    point = next(plane.points("cuda"))
    case = point.case("cuda", "k1_naive,k3_registers,k6_hopper")
    assert case.kernels == "k1_naive,k3_registers,k6_hopper"
    assert point.dense.case("cuda", case.kernels).kernels == ""
    found = {
        "auto": "k8_small_batch",
        "seconds": {"k1_naive": 2e-6, "k3_registers": 1e-6, TRITON: 5e-7},
        "not_timed": {"k6_hopper": "wrong: NaN in the result", CUBLAS: "failed"},
    }
    monkeypatch.setattr(Case, "measured", lambda *_: found)
    row = plane._row(point, "cuda", case.kernels)
    assert row["rung"] == "k3_registers"
    assert row["microseconds"] == {OURS: 1.0, TRITON: 0.5}
    assert row["faults"] == {"k6_hopper": "wrong: NaN in the result"}


def gpus_seen(card):
    yield card, os.environ[VISIBLE]
    if card == 1:
        os._exit(1)  # costs its own part
    yield card, "on"


def test_each_card_has_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv(VISIBLE, "4,2")
    assert sorted(on_each(2, gpus_seen)) == [(0, "4"), (0, "on"), (1, "2")]
    assert os.environ[VISIBLE] == "4,2"
    with pytest.raises(ValueError, match="3 cards, and CUDA_VISIBLE_DEVICES=4,2 shows 2"):
        next(on_each(3, gpus_seen))


def test_cards_share_the_map_between_them(monkeypatch, small):
    monkeypatch.setattr(plane, "_row", lambda point, place, kernels: point)
    how = "cpu", [], 60.0, 1, "float32", 3, "auto"
    parts = [set(plane.measured(*how, card)) for card in range(3)]
    assert set.union(*parts) == set(plane.points("cpu"))
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert all(parts)
    assert list(plane.measured("cpu", [], 60.0, 1, "float16")) == []
    with pytest.raises(ValueError, match="3 cards: the CPU's map takes one process"):
        plane.run("cpu", None, 1, cards=3)


@pytest.mark.parametrize(
    ("place", "given", "says"),
    [
        ("cpu", {"dtype": "float16"}, "dtype takes float32 with place=cpu, got float16"),
        ("cpu", {"kernels": "k0_cpu,k6_hopper"}, "kernels takes auto, .* place=cpu, got k6_hopper"),
        ("cuda", {"kernels": "k0_cpu"}, "kernels takes auto, k1_naive, .*place=cuda, got k0_cpu"),
    ],
)
def test_what_a_place_does_not_compute_is_refused(place, given, says):
    """It would measure nothing, for as many minutes."""
    with pytest.raises(ValueError, match=says):
        plane.run(place, None, 1, **given)


@pytest.mark.parametrize("columns", [[], ["batch"], plane.COLUMNS[::-1]])
def test_a_file_of_something_else_is_refused(tmp_path, columns):
    """Columns in another order too: new rows are written in ours."""
    file, command = tmp_path / "map.json", "python -m numbsparse plane --place cpu"
    row = list(range(len(columns)))
    content = {"machine": "", "command": command, "columns": columns, "rows": [row]}
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"map\.json is not a map of the plane"):
        plane.run("cpu", file, 0)


def test_without_minutes_a_map_is_read_where_there_is_no_gpu(tmp_path, monkeypatch):
    def no_driver(*_):
        raise RuntimeError("no driver")

    monkeypatch.setattr(plane, "require_times", no_driver)
    monkeypatch.setattr(plane, "describe", no_driver)
    file = tmp_path / "map.json"
    for given in (None, file):
        with pytest.raises(ValueError, match=f"minutes=0 takes the file of a map .*, got {given}"):
            plane.run("cuda", given, 0)
    content = {"machine": "a card", "command": "python -m numbsparse plane --place cuda"}
    lines = {"columns": list(ROWS[0]), "rows": [list(each.values()) for each in ROWS]}
    file.write_text(json.dumps(content | lines))
    before = file.read_bytes()
    machine, rows = plane.run("cuda", file, 0)
    assert machine == "a card"
    assert [plane.point_of(row) for row in rows] == [plane.point_of(row) for row in ROWS]
    for minutes in (0, 5):
        with pytest.raises(ValueError, match=r"map\.json holds another map than that of .* cpu`"):
            plane.run("cpu", file, minutes)
    with pytest.raises(RuntimeError, match="no driver"):
        plane.run("cuda", file, 5)
    assert file.read_bytes() == before


def row(batch, density, microseconds, fault=""):
    size = 32 if density == 1 else 8
    point = plane.Point((64, 64), size, density, batch, "float16", "highest", "forward")
    faults = {OURS: fault} if fault else {}
    return {**point._asdict(), "rung": "k", "microseconds": microseconds, "faults": faults}


ROWS = [
    row(1, 0.5, {OURS: 2.0, "torch BSR": 4.0}),
    row(1, 1.0, {"cuBLAS dense": 3.0}),
    row(8, 0.5, {OURS: 10.0}),
    row(8, 1.0, {"cuBLAS dense": 5.0}),
    row(16, 0.5, {OURS: 1.0}),  # nobody beside it
    row(32, 0.5, {"torch BSR": 4.0}, fault="wrong: NaN in the result"),
]


def test_the_fastest_peer_counts():
    found = {point.batch: found for point, *found in mapped.speed_ups("cuda", ROWS)}
    assert found == {1: [1.5, "cuBLAS dense"], 8: [0.5, "cuBLAS dense"]}
    said = mapped.beside_peers("cuda", ROWS).splitlines()
    assert "NaN in the result" in said[1]
    assert "median 1.00 times the best peer, least 0.50, slower at 1 of 2" in said[2]
    assert said[3].startswith("  0.50 of cuBLAS dense: (64, 64) 8 0.5 8 float16")


def test_a_line_for_each_product_has_its_roofline_beside_it(monkeypatch):
    monkeypatch.setattr(mapped, "times_the_roofline", lambda took: dict.fromkeys(took, 1.6))
    first, second, alone = csv.DictReader(mapped.lines("cuda", ROWS).splitlines())
    beside = {"fastest_peer": "cuBLAS dense", "its_microseconds": "3"}
    roofs = {"roofline_microseconds": "1.25"}
    numbers = {"in_features": "64", "out_features": "64", "batch": "1", "microseconds": "2"}
    assert first.items() >= (numbers | beside | roofs).items()
    assert second.items() >= {"batch": "8", "its_microseconds": "5"}.items()
    assert alone.items() >= {"batch": "16", "fastest_peer": "", "its_microseconds": ""}.items()
    assert len(alone["roofline_microseconds"]) > 0
    of_cpu = [*csv.DictReader(mapped.lines("cpu", ROWS[-2:]).splitlines())]
    assert [each["roofline_microseconds"] for each in of_cpu] == [""]


def test_a_picture_has_a_panel_for_each_kind_and_block_size(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    rows = ROWS + [entry | {"dtype": "float32"} for entry in ROWS]
    drawn = plane.PLANES["cuda"]._replace(block_sizes=(8, 32), densities=(0.5,), batches=(1, 8))
    monkeypatch.setitem(plane.PLANES, "cuda", drawn)
    for name, some in (("one", ROWS), ("two", rows)):
        draw_map("cuda", "a card; and versions", some, tmp_path / f"{name}.png")
    draw_roofline("cuda", "a card; and versions", ROWS, tmp_path / "roofline.png")
    assert imread(tmp_path / "roofline.png").shape
    one, two = (imread(tmp_path / f"{name}.png").shape for name in ("one", "two"))
    assert two[1] == one[1]
    assert two[0] > 1.5 * one[0]


def test_the_real_planes_have_every_point_once():
    for place, kept in plane.PLANES.items():
        found = list(plane.points(place))
        assert len(found) == len(set(found)) > 250
        dense = [point for point in found if point.density == 1]
        behind = {point.dense for point in found} if kept.dense else set()
        assert set(dense) == behind
        found = [point for point in found if point.density < 1]
        cells = len(kept.block_sizes) * len(kept.densities) * len(kept.batches)
        first = found[: cells * len(kept.products)]  # the whole picture, of one dtype
        assert len({point[1:4] for point in first}) == cells
        assert len({point[4:6] for point in first}) == 1
        assert {point.features for point in first} == set(kept.sizes)
