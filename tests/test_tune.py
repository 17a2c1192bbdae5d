"""The fastest rung is measured once, remembered in a file, and taken by kernel="auto"."""

import importlib
import json

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device
from numbsparse.kernels.matmul import PRODUCTS, RUNGS
from numbsparse.ops import choice, tuned

tuning = importlib.import_module("numbsparse.tune")

pytestmark = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of its own, and no choice left behind."""
    monkeypatch.setenv("NUMBSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget():
    tuned._choices.cache_clear()
    choice.forget()


@pytest.fixture
def w():
    blocks = np.random.default_rng(0).standard_normal((3, 4, 4), np.float32)
    return ns.BlockSparse(blocks, [[1, 0], [1, 1]]).to("cuda")


def chosen(w, product="forward", batch=3, across=False):
    x = ns.to_device(np.ones((batch, 8), np.float32))
    of = product, "auto", 4, x, batch, "highest", w.stored_layout
    return choice.choose(*of, feature_major=across)


def test_the_fastest_is_taken_and_remembered(w, folder, monkeypatch):
    untuned = chosen(w)
    slow = {"k1_naive": 1.0, "k3_registers": 2.0}
    times = iter([slow.get(name, 4.0) for _ in PRODUCTS for name in serving(w)])
    monkeypatch.setattr(tuning, "_seconds", lambda call: next(times))
    seconds = ns.tune(w, 3)
    assert list(seconds) == list(PRODUCTS)
    for times_of in seconds.values():
        assert list(times_of.values()) == sorted(times_of.values())
    assert {next(iter(times_of)) for times_of in seconds.values()} == {"k1_naive"}
    assert chosen(w) == "k1_naive"
    assert chosen(w, batch=300) == untuned  # another bucket
    forget()
    assert chosen(w, "weight_grad") == "k1_naive"  # from the file
    (file,) = folder.glob("*.json")
    assert len(json.loads(file.read_text())["fastest"]) == 3


@pytest.mark.parametrize("across", [False, True])
def test_a_choice_is_for_the_order_that_was_measured(w, across, monkeypatch):
    untuned = {order: chosen(w, across=order) for order in (False, True)}
    fast = next(name for name in serving(w) if name not in untuned.values())
    measured, choose = set(), importlib.import_module("numbsparse.ops.matmul").choose

    def noted(*case):
        measured.add(case[-1])
        return choose(*case)

    monkeypatch.setattr(importlib.import_module("numbsparse.ops.matmul"), "choose", noted)
    monkeypatch.setattr(tuning, "_seconds", lambda call: 1.0 + (call.args[0] != fast))
    seconds = ns.tune(w, 3, feature_major=across)
    assert measured == {across}
    assert {next(iter(times)) for times in seconds.values()} == {fast}
    assert {chosen(w, product, across=across) for product in PRODUCTS} == {fast}
    assert chosen(w, across=not across) == untuned[not across]


def serving(w):
    return choice.serving("forward", 4, w.dtype, "cuda", 3, "highest")


def test_it_runs_as_it_is(w):
    seconds = ns.tune(w.T, 2)
    assert all(0 < s < float("inf") for times in seconds.values() for s in times.values())
    assert chosen(w, batch=2) in RUNGS


def test_it_shows_which_product_it_is_at(w, monkeypatch):
    bars = []
    monkeypatch.setattr(tuning, "shown", lambda steps, what: bars.append((what, steps)) or steps)
    monkeypatch.setattr(tuning, "_seconds", lambda call: 1.0)
    seconds = ns.tune(w, 3)
    assert [what for what, _ in bars] == [f"tuning {product}" for product in PRODUCTS]
    assert [set(steps) for _, steps in bars] == [set(times) for times in seconds.values()]


def test_a_wrong_rung_is_never_chosen(w, monkeypatch):
    wrong = serving(w)[0]
    monkeypatch.setattr(tuning, "_seconds", lambda call: 1.0)
    agree = tuning.agree
    answers = iter([False] + [True] * 20)
    monkeypatch.setattr(tuning, "agree", lambda *args: agree(*args) and next(answers))
    assert ns.tune(w, 3)["forward"][wrong] == float("inf")
    assert chosen(w) != wrong


def test_tiles_are_tuned_too(monkeypatch):
    rungs = {name: choice.RUNGS[name] for name in ("k0_cpu", "k1_naive", "k5_tensor_core")}
    monkeypatch.setattr(choice, "RUNGS", rungs)  # the simulator would take its time for all
    blocks = np.random.default_rng(0).standard_normal((2, 32, 32), np.float32)
    w = ns.BlockSparse(blocks, [[1, 0], [0, 1]]).to("cuda")
    times = {"k5_tensor_core/1": 1.0}
    monkeypatch.setattr(tuning, "_seconds", lambda call: times.get(call.args[0], 2.0))
    assert next(iter(ns.tune(w, 3)["forward"])) == "k5_tensor_core/1"
    x = ns.to_device(np.random.default_rng(1).standard_normal((3, 64), np.float32))
    case = ("forward", "auto", 32, x, 3, "highest", w.stored_layout)
    assert choice.choose(*case) == "k5_tensor_core/1"
    np.testing.assert_allclose(
        ns.matmul(x, w).numpy()[:, :32], x.numpy()[:, :32] @ blocks[0], atol=1e-4
    )


def test_refuses_what_no_rung_serves():
    w = ns.BlockSparse(np.ones((1, 5, 5), np.float32), [[1]]).to("cuda")
    with pytest.raises(ValueError, match=r"block_size takes one of .*, got 5"):
        ns.tune(w, 3)


def test_refuses_weights_of_the_cpu(monkeypatch):
    w = ns.BlockSparse(np.ones((1, 4, 4), np.float32), [[1]])
    with pytest.raises(ValueError, match="on the GPU, got one on the CPU: see BlockSparse"):
        ns.tune(w, 3)
    monkeypatch.setattr(device, "why_unavailable", lambda: "no driver was found")
    with pytest.raises(ValueError, match="on the GPU, got one on the CPU: no driver was found"):
        ns.tune(w, 3)


def test_the_first_tile_is_the_rung_itself(w):
    x = ns.to_device(np.random.default_rng(1).standard_normal((2, 8), np.float32))
    for name in serving(w):  # some have no other
        for product in (
            lambda kernel: ns.matmul(x, w, kernel=kernel),
            lambda kernel: ns.matmul(w, x.T, kernel=kernel),
            lambda kernel: ns.sddmm(x.T, x, w, kernel=kernel).values,
        ):
            one, other = (product(kernel).numpy() for kernel in (name, f"{name}/0"))
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("tile", ["2", "-1", "x", ""])
def test_refuses_a_tile_that_is_none(w, tile):
    with pytest.raises(ValueError, match=r"k1_naive has 1 tiles|kernel takes"):
        ns.matmul(np.ones((2, 8), np.float32), w, kernel=f"k1_naive/{tile}")


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", '{"library": "other", "fastest": {}}', "3", '{"library": OWN}',
        '{"library": OWN, "fastest": []}', '{"library": OWN, "fastest": null}', "\0\xff",
        '{"library": OWN, "fastest": {"CASE": ["k1_naive"]}}', "[" * 10**5,
        '{"library": OWN, "fastest": {"CASE": {"k1_naive": 1}}}',
    ],
    ids=lambda content: content[:40],
)  # fmt: skip
def test_a_file_of_another_library_or_a_damaged_one_is_nothing(w, folder, content):
    untuned = chosen(w)
    tuned.remember({tuned.case("forward", 4, w.dtype, 3, "highest", w.layout): "k1_naive"})
    (file,) = folder.glob("*.json")
    choice.forget()
    assert chosen(w) == "k1_naive"
    content = content.replace("OWN", json.dumps(tuned._version()))
    case = tuned.case("forward", 4, w.dtype, 3, "highest", w.layout)
    file.write_text(content.replace("CASE", case), "latin1")
    forget()
    assert chosen(w) == untuned


def test_a_remembered_rung_that_does_not_serve_is_passed_over(w):
    untuned = chosen(w)
    case = tuned.case("forward", 4, w.dtype, 3, "highest", w.layout)
    for rung in ("k5_tensor_core", "k0_cpu", "no such rung", "k6_hopper/9", "k1_naive/1"):
        tuned.remember({case: rung})
        choice.forget()
        assert chosen(w) == untuned


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_batches_may_grow_without_end(w, place):
    x = w.values if place == "cuda" else w.values.numpy()
    for batch in range(1, 2 * choice.MOST):
        name = choice.choose("forward", "auto", 4, x, batch, "highest", w.stored_layout)
        assert (name in RUNGS, RUNGS[name]) == (True, place)
    assert len(choice._chosen) <= choice.MOST


def test_a_folder_that_cannot_be_written_costs_only_the_memory(w, folder):
    folder.write_text("a file, where a folder is expected")
    tuned.remember({tuned.case("forward", 4, w.dtype, 3, "highest", w.layout): "k1_naive"})
    choice.forget()
    assert chosen(w) == "k1_naive"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w: ns.tune(w.to("cpu"), 3), "w takes a BlockSparse on the GPU"),
        (lambda w: ns.tune(np.ones(3), 3), "w takes"),
        (lambda w: ns.tune(w, 0), "batch"),
        (lambda w: ns.tune(w, 3, precision="low"), "precision"),
    ],
    ids=["cpu", "array", "batch", "precision"],
)
def test_refuses(w, call, says):
    with pytest.raises(ValueError, match=says):
        call(w)
