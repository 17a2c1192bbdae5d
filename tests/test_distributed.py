"""Two real processes and more: what they compute together, and how they end where one is odd."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import distributed_programs as programs
import numpy as np
import pytest
from conftest import HAS_BFLOAT16
from distributed_helpers import in_turn, run, values
from examples_helpers import SMALL, imported, write_text

import numbsparse as ns
from numbsparse import device, nn

DTYPES = (*programs.FLOATS, *(["bfloat16"] if HAS_BFLOAT16 else []))
PLACES = ("cpu", "cuda") if device.SIMULATED else ("cpu",)  # on a GPU it is NCCL that is used
in_simulator = pytest.mark.skipif(not device.SIMULATED, reason="on a GPU each rank takes its own")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for what in LOST:
        (folder / what).mkdir()
    return folder


WAYS = [
    ((0, 3), {"sharded": sharded, "bucket": bucket, "parts": parts})
    for sharded, (bucket, parts) in itertools.product((False, True), [(1, 1), (1 << 14, 2)])
]
GROW = "--device cpu --window 4 --features 16 --block-size 8 --batch 8 --seeds 1 --steps 12 "
GROW += "--mark-every 6 --lr 1e-2 --every 4 --no-checkpoints"
MIXTURE = "--width 16 --hidden 16 --experts 2 --block-size 8 --context 4 --tokens 16 --steps 4"
EXAMPLE = [*SMALL, "--no-compare", "--steps", "6"]


@pytest.fixture(scope="module")
def alone(folder):
    """What one process does by itself. It comes first: what it compiles is on disk for the ranks,
    who would each compile all of it at the same time."""
    text = ["--text", write_text(folder)]
    with pytest.MonkeyPatch.context() as patch:
        char_lm, mixture = imported(patch, "char_lm"), imported(patch, "mixture_of_experts")
        grow = imported(patch, "grow")
        patch.setattr("letter_training.ROUNDS", 1)  # of timing
        patch.setattr(char_lm, "write_pictures", lambda *of: None)
        patch.setattr(grow, "draw", lambda file: None)
        return {
            # In parts as small as those of three ranks, and of two with two parts.
            "trainings": {parts: programs.train(0, 3, parts=parts) for parts in (1, 2, 3, 4)},
            "lstm": programs.lstm(1 << 20)[0],
            "example": char_lm.main([*EXAMPLE, *text, "--out", str(folder / "one")]),
            "grow": grow.main([*GROW.split(), *text, "--out", str(folder / "grown alone")]),
            "mixture": mixture.main([*MIXTURE.split(), *text]),
        }


@pytest.fixture(scope="module")
def pair(alone, folder):
    """What two ranks did, one check after the other; at last one is killed."""
    text = ["--text", str(folder / "text.txt")]
    grow = [*GROW.split(), *text, "--out", str(folder / "grow")]
    saving = (0, 2), {"sharded": True, "path": str(folder / "two.npz")}
    return in_turn(
        {
            "collectives": (programs.collectives, 2, DTYPES, PLACES),
            "trainings": (programs.trainings, [*WAYS, saving]),
            "buckets": (programs.buckets, [1, 1 << 20]),
            "lstm": (programs.lstm, 1 << 10),
            **({"half": (programs.half, True)} if device.SIMULATED else {}),
            "masks": (programs.masks,),
            "apart": (programs.apart,),
            "set alike": (programs.layouts_set, (0, 1)),
            "example": (
                programs.example, "char_lm", [*EXAMPLE, *text, "--out", str(folder / "two")],
            ),
            "grow": (programs.example, "grow", grow),
            "mixture": (programs.example, "mixture_of_experts", [*MIXTURE.split(), *text]),
            "knocked": (programs.knocked,),
            **{f"missing {1 - rank}": (programs.missing, rank) for rank in (0, 1)},
            **{what: (programs.other, what, str(folder)) for what in (*SENTENCES, "saving")},
            **{what: (programs.other, what, str(folder / what)) for what in LOST},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def three(pair, folder):
    """What three ranks did, also with what two of them left."""
    more = {"sharded": True, "load": str(folder / "two.npz"), "path": str(folder / "three.npz")}
    return in_turn(
        {
            "collectives": (programs.collectives, 3, DTYPES, PLACES),
            "same bits": (programs.same_everywhere, 0),
            "resumed": (programs.trainings, [((2, 3), more)]),
            "split": (programs.split,),
            "caught": (programs.caught,),
        },
        size=3,
    )


def of(ranks, name):
    return [results[name] for results in ranks]


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_are_numpy_s(size, pair, three):
    assert all(values(of(pair if size == 2 else three, "collectives")))


def test_all_ranks_get_the_same_bits(three):
    assert len(set(values(of(three, "same bits")))) == 1


def test_ranks_train_as_one_process(pair, alone):
    """Plain and sharded, in buckets of one gradient and of several, in whole batches and parts."""
    for two in values(of(pair, "trainings")):
        for got, (_, how) in zip(two, WAYS, strict=False):
            whole = alone["trainings"][how["parts"]]
            np.testing.assert_allclose(got, whole, rtol=1e-9, atol=1e-12)


def test_all_ranks_take_the_layouts_of_the_first(pair):
    """Where ranks drew others: with values, gradients and all."""
    layout = ns.patterns.random(6, 6, 0.4, seed=0)
    first = nn.Linear(24, 24, layout=layout, block_size=4, dtype="float64", seed=0)
    for weight, pattern, buffer in values(of(pair, "apart")):
        np.testing.assert_array_equal(weight, first.weight.data.toarray())
        np.testing.assert_array_equal(pattern, layout)
        np.testing.assert_array_equal(buffer, [0, 2, 4])


def test_training_resumes_on_any_number(three, alone, folder):
    whole, resumed = alone["trainings"][1], programs.train(2, 3, load=str(folder / "two.npz"))
    for (got,) in values(of(three, "resumed")):
        np.testing.assert_allclose(got, whole, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(resumed, whole, rtol=1e-9, atol=1e-12)
    written = programs.flat(ns.load(folder / "three.npz"))
    np.testing.assert_allclose(written, whole, rtol=1e-9, atol=1e-12)


def test_parts_of_a_group_compute_by_themselves(three):
    """Of ranks 0, 1 and 2: 0 and 1 beside 2; 0 and 2 beside 1; each alone."""
    assert values(of(three, "split")) == [
        [(0, 2, [11.0] * 2), (0, 2, [101.0] * 2), (0, 1, [1.0] * 2)],
        [(1, 2, [11.0] * 2), (0, 1, [10.0] * 2), (0, 1, [10.0] * 2)],
        [(0, 1, [100.0] * 2), (1, 2, [101.0] * 2), (0, 1, [100.0] * 2)],
    ]


def test_every_gradient_is_reduced_once_in_buckets(pair):
    """Small ones side by side, each from a multiple of 256 bytes on."""
    sizes = [p.values.size for p in reversed(list(programs.model_of(0).parameters()))]
    for each, whole in values(of(pair, "buckets")):
        assert sorted(each) == sorted(sizes)
        assert len(whole) == 1
        assert sum(sizes) <= whole[0] <= sum(sizes) + 32 * len(sizes)


def test_the_gradient_of_an_lstm_is_reduced_in_parts(pair, alone):
    """But not in the first pass, which finds the order, nor where it is added to another."""
    for got, reductions in values(of(pair, "lstm")):
        np.testing.assert_allclose(got, alone["lstm"], rtol=1e-9, atol=1e-14)
        assert sorted(reductions[:3]) == sorted(reductions[3:6])
        assert max(reductions[6:]) < max(reductions)
        assert sum(reductions) == got.size


@in_simulator
def test_half_precision_in_a_captured_step(pair):
    """Every rank skips the step in which one of them has no finite gradient."""
    alone, scale = programs.half(False)
    assert scale == 128
    for got, own in values(of(pair, "half")):
        assert own == scale
        np.testing.assert_allclose(got, alone, rtol=0.02, atol=1e-4)


def test_dropout_differs_from_rank_to_rank(pair):
    (mask, seed), (other, same) = values(of(pair, "masks"))
    np.testing.assert_array_equal(mask, nn.Dropout(0.5, seed=7)(np.ones(64)).numpy())
    assert (mask != other).any()
    assert seed == same == 7


def test_an_example_learns_the_same_on_two_ranks(pair, alone, folder, monkeypatch):
    """And goes on alone from what two have written."""
    assert values(of(pair, "example")) == [pytest.approx(alone["example"], rel=1e-4)] * 2
    given = [*EXAMPLE, "--text", str(folder / "text.txt"), "--resume", "--steps", "8"]
    two, one = (["--out", str(folder / name)] for name in ("two", "one"))
    main = imported(monkeypatch, "char_lm").main
    assert main([*given, *two]) == pytest.approx(main([*given, *one]), rel=1e-4)


def test_layouts_grow_the_same_on_two_ranks(pair, alone):
    for runs in values(of(pair, "grow")):
        for one, other in zip(runs, alone["grow"], strict=True):
            np.testing.assert_allclose(one["curve"], other["curve"], rtol=1e-4)
            assert [s["layouts"] for s in one["stages"]] == [s["layouts"] for s in other["stages"]]


def test_experts_train_on_two_ranks(pair, alone):
    """The balance is that of a rank's tokens; else it is one training."""
    for bits in values(of(pair, "mixture")):
        assert bits["dense"] == pytest.approx(alone["mixture"]["dense"], rel=1e-4)
        assert bits["experts"] == pytest.approx(alone["mixture"]["experts"], rel=1e-2)


SENTENCES = {
    "version": "rank 1 has numbsparse 0.0.1, where rank 0 has ",
    "call": "rank 1 called all_gather of float64 (3,), where rank 0 called all_reduce of float64",
    "shape": "rank 1 called all_reduce of float64 (4,) sum, where rank 0 called all_reduce of",
    "layout": "rank 1 has another model: 0.weight is float64, 32 x 128 in blocks of 8",
    "one layout": "rank 1 set a layout before backward pass 1, rank 0 did not: all ranks do so",
    "dtype": "rank 1 has another model: 0.weight is float32",
    "reached": "backward did not reach 2.weight on rank 1, unlike on rank 0",
}


@pytest.mark.parametrize("what", SENTENCES)
def test_what_differs_is_said_on_all_ranks(what, pair):
    for kind, _, said in of(pair, what):
        assert kind == "raised"
        assert SENTENCES[what] in said
        assert "\n" not in said


LOST = {
    "memory": "rank 1 failed: MemoryError: 9 GiB were asked for; rank 0 ends",
    "left": "rank 1 has ended its program while rank 0 waits for it; rank 0 ends",
    "skipped": "rank 1 failed: ValueError: backward did not reach 2.weight on rank 1, unlike be",
    "killed": "rank 1 ended without a word: killed, or out of memory; rank 0 ends",
}


@pytest.mark.parametrize("what", LOST)
def test_a_lost_rank_ends_all_and_the_checkpoint_stays(what, pair, folder):
    first, _ = of(pair, what)
    assert first[:2] == ("raised", "SystemExit")
    assert first[2].startswith(LOST[what])
    assert pair[0][f"seconds of {what}"] < 20  # it is known, and nobody waits for `timeout`
    assert ns.load(folder / what / "checkpoint.npz") == {"step": 1}


def test_who_is_lost_is_known_to_all_and_may_be_caught(three):
    first, second, third = of(three, "caught")
    said = "rank 1 ended without a word: killed, or out of memory"
    assert first == third == ("gave", said)
    assert second == ("died",)


def test_a_rank_that_does_not_listen_is_ended(tmp_path):
    assert run(programs.other, "busy", str(tmp_path)) == [("died",), ("died",)]


@pytest.mark.parametrize(
    ("by", "captured"), [(0, False), pytest.param(1, True, marks=in_simulator)]
)
def test_a_layout_that_one_rank_alone_sets_ends_all(by, captured):
    """Also where the other one waits for its gradient, and would for ever."""
    ends = run(programs.layouts_set, (by,), captured)
    assert {kind for kind, *_ in ends} <= {"raised", "died"}
    assert ends[by][2].startswith(
        f"rank {1 - by} ended too: rank {by} set a layout before backward pass 5, "
        f"rank {1 - by} did not: all ranks do so before the same pass; rank {by} ends"
    )


def test_all_ranks_may_set_layouts(pair):
    assert values(of(pair, "set alike")) == [16] * 2


def test_a_file_that_cannot_be_written_is_said_on_all_ranks(pair):
    (_, kind, said), (_, other, told) = of(pair, "saving")
    assert kind in ("FileNotFoundError", "NotADirectoryError")
    assert other == "RuntimeError"
    assert said in told


@pytest.mark.parametrize("comes", [0, 1])
def test_a_missing_rank_is_named(comes, pair):
    kind, error, said = of(pair, f"missing {1 - comes}")[comes]
    missing = "rank 1 of 2 has not come in 0.5 seconds"
    assert (kind, error) == ("raised", "RuntimeError")
    assert missing == said if comes == 0 else "rank 0 does not answer at 127.0.0.1" in said


def test_strangers_at_the_port_are_let_go(pair):
    assert values(of(pair, "knocked")) == [None, None]


def mpi_runs():
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # it is there, and MPI is not
        return False
    return MPI is not None and shutil.which("mpirun") is not None


def test_collectives_by_mpi():
    if not mpi_runs():
        pytest.skip("mpi4py or mpirun is missing")
    code = "import distributed_programs as p; assert p.collectives(4, p.FLOATS, ['cpu'])"
    folder = Path(__file__).parent
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    few = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}  # cores
    few |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    path = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    names = os.environ | root | few | {"RANKS_BACKEND": "mpi", "PYTHONPATH": path}
    command = ["mpirun", "-n", "2", sys.executable, "-c", code]
    subprocess.run(command, env=names, check=True, timeout=60)
