"""The choice of a rung goes by measured times: exact on their grid, sensible between."""

import json

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import PRODUCTS, RUNGS, rung
from numbsparse.kernels.matmul.k9_dense_tiles import plan
from numbsparse.layout import Layout
from numbsparse.ops import choice, times, tuned

on_device = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


@pytest.fixture
def written(monkeypatch, tmp_path):
    """A function that puts a grid in the place of the library's own."""

    def write(microseconds):
        content = {"features": [64, 256], "densities": [0.25, 1], "batches": [1, 4, 64]}
        file = tmp_path / "times.json"
        file.write_text(json.dumps(content | {"microseconds": microseconds}))
        monkeypatch.setattr(times, "FILE", file)
        times.measured.cache_clear()
        choice.forget()

    monkeypatch.setattr(tuned, "fastest", lambda case: None)
    yield write
    times.measured.cache_clear()
    choice.forget()


def layout(rows, columns, density):
    pattern = np.zeros((rows, columns), bool)
    pattern.reshape(-1)[: round(density * pattern.size)] = True
    return Layout(pattern)


RISING = [2.0**n for n in range(12)]


@pytest.mark.parametrize(
    ("features", "density", "batch", "power"),
    [
        (64, 0.25, 1, 0),
        (64, 0.25, 64, 2),
        (256, 1, 64, 11),
        (64, 0.25, 2, 0.5),  # halfway between two batches
        (64, 0.5, 4, 2.5),  # between two densities, which are three places apart
        (128, 0.25, 1, 3),
        (64, 0.25, 49, 2),  # in as many tiles of rows as 64
        (128, 0.0625, 1, 3),  # before the first density
        (64, 0.25, 4096, 3.5),  # beyond the last batch
        (1024, 1, 64, 15),  # beyond the last features: as many times as there are values
    ],
)
def test_times_are_interpolated_in_logarithms(written, features, density, batch, power):
    written({"forward float16 B=32": {"k5_tensor_core": RISING}})
    blocks = features // 32
    case = 32, as_dtype("float16"), batch, "highest", layout(blocks, blocks, density)
    assert times.expected("forward", *case) == {"k5_tensor_core": pytest.approx(2**power)}
    assert times.expected("input_grad", *case) == {}


def test_a_product_is_as_one_of_a_square_weight(written):
    """With sides between the line of the result and the mean of both sides."""
    written({f"{product} float16 B=32": {"k8_small_batch": RISING} for product in PRODUCTS})
    wide, square = layout(2, 32, 1.0), layout(16, 16, 0.25)
    case = 32, as_dtype("float16"), 4, "highest"
    assert times.expected("forward", *case, wide) == times.expected("forward", *case, square)
    tall = times.expected("input_grad", *case, layout(32, 2, 1.0))
    assert tall == times.expected("forward", *case, wide)
    both = times.expected("weight_grad", *case, wide)  # of 256 features, all blocks kept
    assert both == times.expected("weight_grad", *case, layout(8, 8, 1.0))


def test_a_line_longer_than_others_is_late(written):
    """Of rungs that do not cut it, and with few rows: else all multiprocessors are busy anyway."""
    written({"forward float16 B=32": {"k5_tensor_core": RISING, "k8_small_batch": RISING}})
    heavy = np.eye(32, dtype=bool)
    heavy[:, 3] = True
    case = "forward", 32, as_dtype("float16")
    few, many = (times.expected(*case, batch, "highest", Layout(heavy)) for batch in (4, 4096))
    cut = few["k8_small_batch"] - times.ADDED
    assert few["k5_tensor_core"] == pytest.approx(cut * 32 / (63 / 32 + 3 * (63 / 32) ** 0.5))
    assert few["k5_tensor_core"] > 5 * cut
    assert many["k5_tensor_core"] == pytest.approx(many["k8_small_batch"] * 32 / (63 * 64 / 512))


@pytest.mark.parametrize(
    ("size", "dtype", "share"),
    [(8, "float16", 64), (16, "float32", 16), (32, "float16", 8)],
)
def test_k8_adds_up_lines_that_are_longer_than_a_share(written, size, dtype, share):
    """Longer ones take more, until as much is added up as there ever is at once."""
    numbers = {"float16": "float16", "float32": "float32 highest"}[dtype]
    written({f"forward {numbers} B={size}": {"k8_small_batch": [1.0] * 12}})

    def took(longest):
        pattern = np.eye(160, dtype=bool)
        pattern[:longest], pattern[:longest, 0] = False, True
        case = "forward", size, as_dtype(dtype), 4, "highest", Layout(pattern)
        return times.expected(*case)["k8_small_batch"]

    more = [
        took(longest) - took(1) for longest in (share, share * 3 // 2, share * 2, share * 5 // 2)
    ]
    assert more == pytest.approx([0, times.ADDED / 2, times.ADDED, times.ADDED])


@pytest.mark.parametrize("name", ["k6_hopper", "k7_small_blocks"])
def test_a_long_line_of_few_features_is_shared_out(written, name):
    """More multiprocessors have rows of it: many rows are as late as few of a wide w."""
    size, dtype = {"k6_hopper": 32, "k7_small_blocks": 8}[name], as_dtype("float16")
    written({f"forward float16 B={size}": {name: [0.01] * 12}})
    column = np.zeros((times.WIDE // size,) * 2, bool)
    column[:, 3] = True
    wide, narrow = Layout(column), Layout(column[:, : len(column) // 4].copy())
    of_wide, of_narrow = (
        times.expected("forward", size, dtype, rows, "highest", each)[name]
        for rows, each in ((2048, wide), (8192, narrow))
    )
    assert of_wide == pytest.approx(of_narrow)
    assert of_wide > times.LAUNCH + len(column) * times.LINES[name, 2][0][size]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("name", "size"), [("k6_hopper", 32), ("k7_small_blocks", 8)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_multiprocessor_is_left_with_the_longest_line(written, product, name, size, dtype):
    """That of the outputs, by k6 and k7; k8 takes as long as before for lines it does not cut."""
    numbers = f"{dtype} highest" if dtype == "float32" else dtype
    flat = {name: [1.0] * 12, "k8_small_batch": [1.0] * 12}
    written({f"{product} {numbers} B={size}": flat})
    row, column = np.zeros((2, 8, 8), bool)
    row[3], column[:, 3] = True, True  # the longest input line, the longest output line
    case = product, size, as_dtype(dtype), 64, "highest"
    of_row, of_column = (times.expected(*case, Layout(each)) for each in (row, column))
    of_blocks, _ = times.LINES[name, as_dtype(dtype).itemsize]
    late = pytest.approx(max(times.LAUNCH + 8 * of_blocks[size], 1.0))
    one = pytest.approx(max(times.LAUNCH + of_blocks[size], 1.0))
    assert of_column[name] == {"forward": late, "input_grad": one, "weight_grad": 1.0}[product]
    assert of_row[name] == {"forward": one, "input_grad": late, "weight_grad": 1.0}[product]
    assert of_row["k8_small_batch"] == of_column["k8_small_batch"] == 1.0


@pytest.mark.parametrize(("rows", "late"), [(64, times.UNKNOWN), (1025, 1.0)])
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_where_nobody_knows_the_longest_line_it_may_be_a_full_one(written, product, rows, late):
    """Of rows that do not share it out; and it takes no more than k8 does where lines are even."""
    flat = {"k6_hopper": [1.0] * 12, "k8_small_batch": [1.0] * 12}
    written({f"{product} float16 B=32": flat})
    made = Layout(np.eye(8, dtype=bool))
    vars(made)["longest"] = 0, 0
    found = times.expected(product, 32, as_dtype("float16"), rows, "highest", made)
    assert found == {"k6_hopper": pytest.approx(late), "k8_small_batch": 1.0}


@pytest.mark.parametrize(("rows", "nth"), [(128, 0), (129, 1)])
def test_weight_gradients_that_a_gpu_plans_take_longer_by_k6(written, rows, nth):
    written({"weight_grad float16 B=32": {"k6_hopper": [1.0] * 12, "k8_small_batch": [1.0] * 12}})
    of_host, made = (Layout(np.eye(8, dtype=bool)) for _ in range(2))
    vars(made)["longest"] = 0, 0
    one, two = (
        times.expected("weight_grad", 32, as_dtype("float16"), rows, "highest", each)
        for each in (of_host, made)
    )
    assert one == {"k6_hopper": 1.0, "k8_small_batch": 1.0}
    assert two == one | {"k6_hopper": pytest.approx(times.PLANNED_THERE[nth])}


@pytest.mark.parametrize(
    ("batch", "k6", "k8"),
    [(64, 1, 1), (33, 1 + 2.0, 1.3), (96, 1, 0.7), (97, 1 + 2.0, 0.7 + 2.0)],
)
def test_feature_major_rows_are_copied_unless_aligned(written, batch, k6, k8):
    """But by k8, which reads few where they are, and of small blocks those that it needs."""
    flat = {name: [1.0] * 12 for name in ("k7_small_blocks", "k8_small_batch")}
    written({"forward float16 B=16": flat})
    case = "forward", 16, as_dtype("float16"), batch, "highest", layout(16, 16, 0.25)
    copied = batch % 8 * times.A_MEGABYTE * batch * 512 * 2 / 1e6 / max(batch % 8, 1)
    found = times.expected(*case, feature_major=True)
    in_order = times.expected(*case)
    more = found["k7_small_blocks"] - in_order["k7_small_blocks"]
    assert more == pytest.approx(k6 - 1 + copied)
    own = copied if batch > 64 else 0
    assert found["k8_small_batch"] == pytest.approx(k8 + own)
    assert in_order["k8_small_batch"] == 1.0


@on_device
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("left", [False, True])
def test_a_call_tells_the_choice_how_its_rows_lie(monkeypatch, order, left):
    told = []
    monkeypatch.setattr(times, "expected", lambda *of: told.append(of) or {})
    w = ns.BlockSparse(np.ones((2, 32, 32), np.float32), np.eye(2)).to("cuda")
    x = np.ones((8, 64), np.float32)
    choice.forget()
    x = device.to_device(np.ascontiguousarray(x.T if order == "F" else x))
    x = x.T if order == "F" else x
    y = w.T @ x.T if left else x @ w
    ns.sddmm(x.T, x, w)
    choice.forget()
    assert y.shape == ((64, 8) if left else (8, 64))
    assert [of[-1] for of in told] == [order == "F"] * 2


def test_a_rung_that_was_not_measured_around_a_point_has_no_time_there(written):
    some = [None if n % 3 == 2 else 1.0 for n in range(12)]  # not at batch 64
    written({"forward float16 B=32": {"k8_small_batch": some, "k5_tensor_core": RISING}})
    case = 32, as_dtype("float16")
    of = layout(2, 2, 0.25)
    assert times.expected("forward", *case, 4, "highest", of).keys() == {
        "k8_small_batch",
        "k5_tensor_core",
    }
    assert times.expected("forward", *case, 5, "highest", of).keys() == {"k5_tensor_core"}
    assert times.expected("forward", *case, 0, "highest", of) == {}
    assert times.expected("forward", *case, 4, "highest", layout(2, 2, 0)) == {}


@pytest.mark.parametrize("as_dense", [True, False])
def test_dense_tiles_of_few_features_take_what_was_measured(as_dense, written, monkeypatch):
    """Whatever their tiles keep; of more features they are as strips are, if at all."""
    monkeypatch.setattr(times, "is_dense", lambda *case: as_dense)
    dense = [7.0] * 6 + [None] * 6
    written({"forward float16 B=8": {"k7_small_blocks": RISING, "k9_dense_tiles": dense}})
    case = "forward", 8, as_dtype("float16"), 64, "highest"
    few, more = (times.expected(*case, layout(n, n, 0.5)) for n in (8, 32))
    assert few["k9_dense_tiles"] == pytest.approx(7)
    assert ("k9_dense_tiles" in more) == as_dense


@pytest.mark.parametrize(
    ("product", "dtype", "batch", "as_dense"),
    [
        ("forward", "float16", 64, True),
        ("input_grad", "bfloat16", 64, True),
        ("forward", "float16", 63, False),
        ("forward", "float32", 64, False),
        ("weight_grad", "float16", 64, False),
    ],
)
def test_what_is_multiplied_as_if_dense_takes_as_long_for_more_blocks(
    product, dtype, batch, as_dense, written, monkeypatch
):
    monkeypatch.setitem(plan.WORTH, 8, ((64, 0.25),))
    of_rung = {"k7_small_blocks": RISING, "k8_small_batch": RISING}
    cases = f"{product} float16 B=8", f"{product} float32 highest B=8"
    written(dict.fromkeys(cases, of_rung))
    case = product, 8, as_dtype(dtype), batch, "highest"
    few, many = (times.expected(*case, layout(32, 32, density)) for density in (0.25, 1.0))
    assert many["k8_small_batch"] > few["k8_small_batch"]
    assert many["k7_small_blocks"] > few["k7_small_blocks"]
    assert few.keys() == many.keys() == of_rung.keys() | ({"k9_dense_tiles"} if as_dense else set())
    if as_dense:
        assert many["k9_dense_tiles"] == few["k9_dense_tiles"] == few["k7_small_blocks"]


def test_numbers_share_times():
    case = times.case_of("forward", 32, as_dtype("bfloat16"), "high")
    assert case == times.case_of("forward", 32, as_dtype("float16"), "highest")
    assert "high " in times.case_of("forward", 32, np.dtype(np.float32), "high")


@on_device
def test_the_choice_is_the_fastest_of_those_that_serve(written):
    x, of = ns.to_device(np.ones((4, 64), np.float32)), layout(2, 2, 0.25)
    case = 32, x, 4, "highest", of

    def chosen(**seconds):
        written({"forward float32 highest B=32": {n: [s] * 12 for n, s in seconds.items()}})
        return choice.choose("forward", "auto", *case)

    assert chosen(k1_naive=2.0, k3_registers=1.0, k5_tensor_core=3.0) == "k3_registers"
    assert chosen(k7_small_blocks=1.0, k1_naive=2.0) == "k1_naive"  # k7 takes no B = 32
    served = choice.serving("forward", 32, np.dtype(np.float32), "cuda", 4, "highest")
    assert chosen() == served[0]  # nothing known: the last of the ladder
    assert choice.choose("forward", "k1_naive", *case) == "k1_naive"


def test_the_committed_times_are_whole():
    content = json.loads(times.FILE.read_text(encoding="utf-8"))
    shape = [len(content[axis]) for axis in times.AXES]
    for axis in times.AXES:
        assert len(content[axis]) > 1
        assert content[axis] == sorted(content[axis])
    assert len(content["microseconds"]) == len(PRODUCTS) * 3 * 5
    for of_rung in content["microseconds"].values():
        assert of_rung.keys() <= RUNGS.keys()
        known = [[np.nan if s is None else s for s in array] for array in of_rung.values()]
        arrays = np.array(known, float)
        assert arrays.shape[1] == np.prod(shape)
        assert not np.isnan(arrays).all(0).any()  # some rung serves everywhere
        assert (arrays[~np.isnan(arrays)] > 0).all()


@on_device
@pytest.mark.slow
def test_a_grid_is_measured(written, monkeypatch):
    from numbsparse.bench import measure as measuring
    from numbsparse.bench import times as bench
    from numbsparse.bench import timing

    monkeypatch.setattr(bench, "BLOCK_SIZES", (8,))
    monkeypatch.setattr(bench, "PRODUCTS", ("forward",))
    monkeypatch.setattr(bench, "APART", (("float32", "highest"),))
    takes = lambda seconds: lambda graphs, _: dict.fromkeys(graphs, seconds)  # noqa: E731
    monkeypatch.setattr(measuring, "graph_of", lambda _, call: timing.Graph(call, 1, call))
    monkeypatch.setattr(measuring, "seconds_of", takes(1e-6))
    takes_one = lambda *case: None if case[4] == 1 else "takes one row"  # noqa: E731
    monkeypatch.setattr(rung("k8_small_batch"), "unsupported", takes_one)
    content = bench.grid((16,), (0.5,), (1, 2))
    ((case, of_rung),) = content["microseconds"].items()
    assert {"k3_registers", "k7_small_blocks"} <= of_rung.keys()
    assert "k1_naive" not in of_rung
    assert of_rung.pop("k8_small_batch") == [1.0, None]
    assert all(array == [1.0, 1.0] for array in of_rung.values())
    monkeypatch.setattr(measuring, "seconds_of", takes(2e-6))
    (found,) = bench.grid((16,), (0.5,), (1, 2), "k8_small_batch")["microseconds"].values()
    assert found == {"k8_small_batch": [2.0, None]}
    assert bench.grid((16,), (0.5,), (1,), "k6_hopper")["microseconds"] == {case: {}}
    written(content["microseconds"])  # of other axes than the file says, so nothing is chosen
    monkeypatch.setattr(measuring, "chosen", lambda *_: "k3_registers")
    monkeypatch.setattr(bench, "FEATURES", (16,))
    monkeypatch.setattr(bench, "DENSITIES", (0.5,))
    monkeypatch.setattr(bench, "BATCHES", (1, 2))
    monkeypatch.setattr(bench, "require_times", lambda: None)
    bench.run(times.FILE, 0, "k7_small_blocks")
    (again,) = json.loads(times.FILE.read_text(encoding="utf-8"))["microseconds"].values()
    assert again == of_rung | {"k7_small_blocks": [2.0, 2.0]}


@pytest.mark.skipif(not device.SIMULATED, reason="of the simulator")
def test_the_simulator_times_nothing():
    with pytest.raises(SystemExit, match="simulator's times mean nothing"):
        command_line.main(["times", "--points", "1"])
