"""The choice of a rung goes by what products are expected to take: counts, times factors."""

import json
from itertools import islice
from itertools import product as every

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.bench import held_out
from numbsparse.bench.problem import APART, BLOCK_SIZES
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import times
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.layout import Layout
from numbsparse.ops import choice, tuned

on_device = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")
FLOAT16 = as_dtype("float16")


@pytest.fixture
def written(monkeypatch, tmp_path):
    """A function that puts factors in the place of the library's own."""

    def write(factors):
        file = tmp_path / "times.json"
        file.write_text(json.dumps({"factors": factors}))
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


def counts(name, product, size, dtype, rows, of, across=False):
    sizes = times.sizes_of(product, size, as_dtype(dtype), rows, of, across)
    return np.array(times.counts(name, sizes))


def served():
    """(rung, product, block size, dtype, precision) of each case."""
    for product, size, numbers in every(PRODUCTS, BLOCK_SIZES, APART):
        names = ["k8_small_batch"] + ["k5_tensor_core"] * (size >= 16)
        names += ["k6_hopper"] if size >= 32 else ["k7_small_blocks"]
        dense = size < 32 and numbers[0] == "float16" and product != "weight_grad"
        for name in names + [times.DENSE] * dense:
            yield name, product, size, *numbers


def test_microseconds_are_counts_times_factors(written):
    of = layout(16, 16, 0.25)
    own = counts("k6_hopper", "forward", 32, "float16", 100, of)
    factors = np.arange(1.0, own.size + 1)
    written({"k6_hopper lines float16 32": factors.tolist()})
    case = 32, FLOAT16, 100, "highest"
    assert times.expected("forward", *case, of) == {"k6_hopper": pytest.approx(own @ factors)}
    assert times.expected("weight_grad", *case, of) == {}  # nothing known
    assert times.expected("forward", 32, FLOAT16, 0, "highest", of) == {}
    assert times.expected("forward", *case, layout(16, 16, 0)) == {}


@pytest.mark.parametrize(("name", "product", "size", "dtype", "precision"), list(served()))
def test_more_work_has_more_counts(name, product, size, dtype, precision):
    """Four times as many rows, and as many blocks; nothing is negative, or no number.

    Sums that are cut where there are few have less to do where there are more: there bytes count.
    """
    few, many = layout(32, 32, 0.1), layout(64, 64, 0.1)
    least = counts(name, product, size, dtype, 512, few)
    assert np.isfinite(least).all()
    assert (least >= 0).all()
    assert least[0] == 1  # a launch
    for more in (
        counts(name, product, size, dtype, 2048, few),
        counts(name, product, size, dtype, 512, many),
    ):
        assert more.size == least.size
        assert (more >= 0).all()
        are_cut = name in ("k5_tensor_core", "k7_small_blocks")
        are_cut |= name == "k6_hopper" and not device.SIMULATED  # or of other tiles
        assert (more[-9] if are_cut else more.sum()) > (least[-9] if are_cut else least.sum())


@pytest.mark.parametrize("name", ["k5_tensor_core", "k6_hopper", "k8_small_batch"])
@pytest.mark.parametrize(("rows", "features"), [(1, 32), (8192, 32), (1, 4096), (8192, 4096)])
def test_the_smallest_and_the_largest_products_have_counts(name, rows, features):
    for product, dtype in every(PRODUCTS, ("float16", "float32")):
        for of in (Layout(np.ones((1, 1))), layout(features // 32, 3, 1.0)):
            found = counts(name, product, 32, dtype, rows, of)
            assert np.isfinite(found).all()
            assert (found >= 0).all()


@pytest.mark.parametrize(
    ("name", "size"),
    [("k6_hopper", 64), ("k7_small_blocks", 8), ("k8_small_batch", 32)],
)
def test_a_line_longer_than_others_takes_longer(name, size):
    """That of the outputs; a weight-gradient has none."""
    row, column = np.eye(64, dtype=bool), np.eye(64, dtype=bool)
    row[3], column[:, 3] = True, True
    for product, longer, other in (
        ("forward", column, row),
        ("input_grad", row, column),
        ("weight_grad", row, row),
    ):
        long, short = (
            counts(name, product, size, "float32", 8, Layout(each)) for each in (longer, other)
        )
        assert (long >= short - 1e-9).all()
        assert (long > short + 1e-9).any() == (product != "weight_grad")


@pytest.mark.parametrize("size", [8, 16, 32])
def test_a_random_layout_has_places_for_all_of_its_blocks(size):
    """However many features were left out, as no block multiplies them."""
    of = times.in_random("forward", size, FLOAT16, 100, 6.3 * size, size, 10)
    assert of.reads >= 10 * size
    assert of.density <= 1
    assert 1 <= of.longest <= 10
    every_line = times.in_random("weight_grad", size, FLOAT16, 1, 3.0, size - 1, 1)
    assert every_line.reads == every_line.makes == size


@pytest.mark.parametrize(
    ("rows", "dtype", "copied"),
    [(64, "float16", 0), (33, "float16", 1), (36, "float32", 0), (34, "float32", 1)],
)
def test_feature_major_rows_are_copied_unless_aligned(rows, dtype, copied):
    of, megabytes = layout(16, 8, 0.5), rows * as_dtype(dtype).itemsize / 1e6
    *_, odd, copies, read, stored = counts("k6_hopper", "forward", 32, dtype, rows, of, True)
    assert (odd, copies) == (copied, copied)
    assert (read, stored) == (copied * 512 * megabytes, copied * 256 * megabytes)
    *_, odd, copies, read, stored = counts("k6_hopper", "weight_grad", 32, dtype, rows, of, True)
    assert (copies, read, stored) == (copied, pytest.approx(copied * 768 * megabytes), 0)
    assert not counts("k6_hopper", "forward", 32, dtype, rows, of)[-4:].any()


def test_blocks_near_each_other_are_in_fewer_tiles():
    together = np.kron(np.eye(4), np.ones((16, 16))) > 0
    apart = np.roll(np.kron(np.ones((16, 16)), np.eye(4)) > 0, 1, axis=1)
    for product in PRODUCTS:
        assert times.spread_of(product, 8, Layout(together)).tiles == 0.25
        assert times.spread_of(product, 8, Layout(apart)).tiles == 1
    assert times.spread_of("forward", 32, Layout(together)).tiles == 1


def test_strips_with_more_blocks_than_others_are_uneven():
    """The first eighth of the outputs has all blocks: of 1,024 features, strips of 128 to 512."""
    heavy, even = np.zeros((128, 128), bool), np.eye(128, dtype=bool)
    heavy[:, :16] = True
    found = times.spread_of("forward", 8, Layout(heavy)).uneven
    assert found == (8, 4, 3, 2)
    assert max(times.spread_of("input_grad", 8, Layout(heavy)).uneven) < 1.2
    longest, others = (
        counts("k7_small_blocks", "forward", 8, "float16", 512, Layout(each))
        for each in (heavy, np.roll(np.kron(np.ones((16, 16)), np.eye(8)) > 0, 1, axis=1))
    )
    assert longest[7] > others[7]
    assert times.spread_of("weight_grad", 8, Layout(heavy)).units == 128 * 4  # of four blocks
    assert times.spread_of("forward", 8, Layout(even)).squares == 1 / 16


def test_a_narrow_dense_tile_meets_fewer_blocks_of_a_band():
    """Tiles of 64 columns have steps where a square has a block, those of 128 where either has."""
    i, j = np.indices((64, 64)) // 4
    spread = times.spread_of("forward", 16, Layout(i == j))
    assert (spread.tiles, spread.squares) == (1 / 8, 1 / 16)


def test_feature_major_lines_that_begin_inside_sectors_or_are_short_count():
    of = layout(32, 32, 0.1)
    for rows, thin, short in ((8, True, True), (16, False, True), (72, True, False), (64, 0, 0)):
        across = counts("k7_small_blocks", "forward", 8, "float16", rows, of, True)
        batch_major = counts("k7_small_blocks", "forward", 8, "float16", rows, of)
        assert (across[-6] > 0, across[4] > 0) == (thin, short)
        assert batch_major[-6] == batch_major[4] == 0


def test_copies_that_k8_reads_small_blocks_in_count():
    """By features; of float32 in weight-gradients none is made."""
    for dtype, rows, copied in (("float16", 512, True), ("float16", 1, False), ("float32", 512, 0)):
        found = counts("k8_small_batch", "weight_grad", 8, dtype, rows, layout(64, 64, 0.5))
        assert (found[8] > 0, found[9] > 0) == (copied, copied)


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


@pytest.mark.parametrize(
    ("product", "rows", "late"),
    [
        ("forward", 64, times.UNKNOWN[0]),
        ("input_grad", 1024, times.UNKNOWN[0]),
        ("forward", 1025, 1.0),
        ("weight_grad", 128, times.PLANNED_THERE[0]),
        ("weight_grad", 129, times.PLANNED_THERE[1]),
    ],
)
def test_k6_takes_longer_where_nobody_knows_the_longest_line(written, product, rows, late):
    """Of a layout made on a GPU; and its weight-gradients are planned there."""
    kind, names = (
        "weight_grad" if product == "weight_grad" else "lines",
        ("k6_hopper", "k8_small_batch"),
    )
    of_host, made = (Layout(np.eye(8, dtype=bool)) for _ in range(2))
    vars(made)["longest"] = 0, 0
    n = {name: counts(name, product, 32, "float16", rows, of_host).size - 1 for name in names}
    written({f"{name} {kind} float16 32": [1.0] + [0.0] * n[name] for name in names})
    one, two = (
        times.expected(product, 32, FLOAT16, rows, "highest", each) for each in (of_host, made)
    )
    assert one == dict.fromkeys(names, 1.0)
    assert two == one | {"k6_hopper": pytest.approx(late)}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_larger_blocks_take_k8_longer_without_a_copy_engine(written, dtype, monkeypatch):
    numbers = "float32 highest" if dtype == "float32" else dtype
    for size, more in ((16, 1.0), (32, times.BY_LANES[as_dtype(dtype).itemsize])):
        of = layout(16, 16, 0.25)
        names = "k5_tensor_core", "k8_small_batch"
        n = {name: counts(name, "forward", size, dtype, 100, of).size - 1 for name in names}
        written({f"{name} lines {numbers} {size}": [1.0] + [0.0] * n[name] for name in names})
        for engine, late in ((True, 1.0), (False, more)):
            monkeypatch.setattr(times, "copy_engine", lambda engine=engine: engine)
            found = times.expected("forward", size, as_dtype(dtype), 100, "highest", of)
            assert found == {"k5_tensor_core": 1.0, "k8_small_batch": pytest.approx(late)}


def test_numbers_share_factors():
    case = times.case_of("k6_hopper", "forward", 32, as_dtype("bfloat16"), "high")
    assert case == times.case_of("k6_hopper", "input_grad", 32, FLOAT16, "highest")
    high = times.case_of("k6_hopper", "weight_grad", 32, np.dtype(np.float32), "high")
    assert high == "k6_hopper weight_grad float32 high 32"


@on_device
def test_the_choice_is_the_fastest_of_those_that_serve(written):
    x, of = ns.to_device(np.ones((4, 64), np.float32)), layout(2, 2, 0.25)
    case = 32, x, 4, "highest", of

    def chosen(**microseconds):
        factors = {}
        for name, took in microseconds.items():
            own = counts(name, "forward", 32, "float32", 4, of)
            factors[f"{name} lines float32 highest 32"] = [took] + [0] * (own.size - 1)
        written(factors)
        return choice.choose("forward", "auto", *case)

    assert chosen(k8_small_batch=2.0, k5_tensor_core=1.0) == "k5_tensor_core"
    assert chosen(k8_small_batch=1.0, k5_tensor_core=2.0) == "k8_small_batch"
    served = choice.serving("forward", 32, np.dtype(np.float32), "cuda", 4, "highest")
    assert chosen() == served[0]  # nothing known: the last of the ladder
    assert choice.choose("forward", "k1_naive", *case) == "k1_naive"


@on_device
def test_a_choice_is_remembered_for_one_order_of_memory_and_one_longest_line(monkeypatch):
    x, layouts = (
        ns.to_device(np.ones((4, 64), np.float32)),
        (Layout(np.eye(2)), Layout([[1, 1], [0, 0]])),
    )

    def expected(*of):
        *_, of_layout, feature_major = of
        return {"k1_naive" if feature_major or max(of_layout.longest) > 1 else "k3_registers": 1.0}

    monkeypatch.setattr(times, "expected", expected)
    monkeypatch.setattr(tuned, "fastest", lambda case: None)
    choice.forget()
    names = [
        choice.choose("forward", "auto", 32, x, 4, "highest", of, feature_major=across)
        for of, across in every(layouts, (False, True))
    ]
    choice.forget()
    assert names == ["k3_registers", "k1_naive", "k1_naive", "k1_naive"]


def test_the_committed_factors_are_whole():
    content = json.loads(times.FILE.read_text(encoding="utf-8"))
    of = layout(16, 16, 0.25)
    for name, product, size, *numbers in served():
        factors = content["factors"][times.case_of(name, product, size, *numbers)]
        assert len(factors) == counts(name, product, size, numbers[0], 64, of).size
        assert min(factors) >= 0
        assert factors[0] > 0.3  # no launch is free


def made_up(count):
    """Drawn products, and seconds that factors give, of counts that are usual of a rung."""
    rng, found, all_counts, few_rows = np.random.default_rng(0), [], {}, {}
    for point, of in enumerate(islice(held_out.drawn(rng), count)):
        problem = of.problem
        how = of.product, problem.block_size, as_dtype(problem.dtype)
        sizes = times.sizes_of(*how, problem.batch, problem.layout, of.feature_major)
        found.append(held_out.Found(of, {}, "", {}, np.nan, {}))
        for name, product, size, dtype, precision in served():
            if (product, size) == how[:2] and (dtype, precision) == (
                problem.dtype.replace("bfloat16", "float16"),
                problem.precision,
            ):
                rung = all_counts.setdefault((name, sizes.lines, sizes.itemsize), {})
                rung[point] = np.array(times.counts(name, sizes))
                few_rows[name, point] = times.of_few_rows(name, sizes)
    for (name, *_), rung in all_counts.items():
        usual = np.maximum(np.mean([*rung.values()], axis=0), 1e-6)
        for point, own in rung.items():
            parts = (own / usual)[1:] / np.arange(1, own.size)
            made = few_rows[name, point] or float(1.5 + parts.sum())
            found[point].seconds[name] = made * 1e-6
    return found


@pytest.mark.skipif(not device.SIMULATED, reason="drawn for the tiles that the simulator has")
def test_factors_that_are_fitted_choose_what_was_faster(monkeypatch):
    from numbsparse.bench import times as bench

    monkeypatch.setattr(bench, "describe", lambda place: "a card")
    found = made_up(300)
    content = bench.content_of(found)
    monkeypatch.setattr(times, "measured", lambda: content["factors"])
    regret = []
    for each in found:
        of, product = each.of.problem, each.of.product
        how = product, of.block_size, as_dtype(of.dtype), of.batch, of.precision, of.layout
        expected = times.expected(*how, each.of.feature_major)
        assert expected.keys() == each.seconds.keys()
        chosen = min(expected, key=expected.__getitem__)
        regret.append(each.seconds[chosen] / min(each.seconds.values()))
    assert np.mean(regret) < 1.001
    assert max(regret) < 1.05


def test_factors_are_most_exact_where_they_decide(monkeypatch):
    """One rung takes as long at all points; the other's times are no sums of what it counts."""
    from numbsparse.bench import times as factors

    n = np.linspace(0.1, 6, 60)
    took = {"a": np.full(n.size, 20.0), "b": 2 + n**2}
    timed = [
        factors.Timed(f"{name} lines float16 8", (1.0, n[point]), of[point], point)
        for name, of in took.items()
        for point in range(n.size)
    ]

    def lost():
        """By the choice, of the time of the fastest."""
        found = factors.fitted_to_choose(timed)
        expected = {name: found[f"{name} lines float16 8"] @ [n**0, n] for name in took}
        chosen = np.where(expected["a"] < expected["b"], took["a"], took["b"])
        return np.mean(chosen / np.minimum(took["a"], took["b"])) - 1

    after = lost()
    monkeypatch.setattr(factors, "LOST", 0.0)
    assert after < 0.002
    assert lost() > 0.1


@on_device
def test_a_command_fits_factors_of_one_rung_or_of_all(written, monkeypatch):
    from numbsparse.bench import times as bench

    drawn, patience = [], []
    monkeypatch.setattr(bench, "describe", lambda place: "a card")
    monkeypatch.setattr(bench, "require_times", lambda: None)
    monkeypatch.setattr(bench, "COUNT", 12)

    def found(points, seconds, jobs):
        drawn.extend(points)
        patience.append(seconds)
        return [held_out.Found(of, {"k8_small_batch": 5e-6}, "", {}, np.nan, {}) for of in drawn]

    monkeypatch.setattr(held_out, "found", found)
    written({"k6_hopper lines float16 32": [1.0]})
    bench.run(times.FILE, 0, "k8_small_batch")
    assert len(drawn) == 12
    assert {of.only for of in drawn} == {"k8_small_batch"}
    assert all(of.alone for of in drawn)
    factors = times.measured()
    assert factors.pop("k6_hopper lines float16 32") == [1.0]  # as it was
    assert {case.split()[0] for case in factors} == {"k8_small_batch"}
    drawn.clear()
    bench.run(times.FILE, 0, minutes=2)
    assert patience == [np.inf, 120]
    assert {of.only for of in drawn} == {None}
    assert "k6_hopper lines float16 32" not in times.measured()


@on_device
@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_products_are_said_when_they_are_timed(monkeypatch, capsys, error):
    """And weighed where the run is broken off."""
    from numbsparse.bench import times as bench

    monkeypatch.setattr(bench, "require_times", lambda: None)

    def found(points, seconds, jobs):
        for n, of in enumerate(points):
            yield held_out.Found(of, {"k8_small_batch": 5e-6}, "k8_small_batch", {}, np.nan, {})
            out = capsys.readouterr().out
            assert out.count("\n") == 1
            assert out.startswith(f"{of}: k8_small_batch of ")
            if n == 3 and error:
                raise error

    monkeypatch.setattr(held_out, "found", found)
    bench.run(None, 2)
    assert capsys.readouterr().out.startswith(f"{4 if error else 6} products of drawn sizes\n")


@pytest.mark.skipif(not device.SIMULATED, reason="of the simulator")
def test_the_simulator_times_nothing():
    with pytest.raises(SystemExit, match="simulator's times mean nothing"):
        command_line.main(["times", "--points", "1"])
