"""What ranks go by, in one process: buckets, links, launchers, and what is refused."""

import os
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module

import numpy as np
import pytest

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import nn
from numbsparse.distributed import environment, links, on_host, rendezvous
from numbsparse.distributed.buckets import buckets_of


@pytest.mark.parametrize("op", on_host.OPERATIONS)
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">f8"])
def test_arrays_are_combined_in_their_byte_order(dtype, shape, op, rng):
    parts = rng.integers(-9, 10, (3, *shape)).astype(dtype)
    total = on_host.combined([parts[i, ...] for i in range(3)], op)
    assert total.dtype == parts.dtype
    expected = getattr(parts.astype(float), op)(axis=0)
    np.testing.assert_allclose(on_host.as_bytes(total).view(dtype).reshape(shape), expected, 1e-6)


def test_a_bucket_has_one_dtype_and_is_sent_as_soon_as_it_is_full(rng):
    dtypes, sizes = rng.choice(["float16", "float32"], 40), rng.integers(1, 900, 40)
    arrays = [np.empty(n, dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    order, least = rng.permutation(40).tolist(), 1000
    found = buckets_of(order, arrays, least)
    assert sorted(i for bucket in found for i in bucket.numbers) == list(range(40))
    last = [order.index(bucket.numbers[-1]) for bucket in found]
    assert last == sorted(last)
    short = [b for b in found if sum(arrays[i].nbytes for i in b.numbers) < least]
    assert len({arrays[b.numbers[0]].dtype for b in short}) == len(short)
    for numbers, starts, size in found:
        assert len({arrays[i].dtype for i in numbers}) == 1
        assert sum(arrays[i].nbytes for i in numbers[:-1]) < least
        assert len(numbers) == 1 or max(arrays[i].nbytes for i in numbers) < least
        ends = [start + arrays[i].size for i, start in zip(numbers, starts, strict=True)]
        assert [start * arrays[numbers[0]].itemsize % 256 for start in starts] == [0] * len(starts)
        assert all(end <= start for end, start in zip(ends, [*starts[1:], size], strict=True))


def test_an_answer_comes_before_the_news_that_its_rank_has_failed():
    here, there = socket.socketpair()
    with there:
        own = links.Links(1, 2, {0: here})
        links.send(there, {}, b"[7]")
        links.send(there, {"rank": 0, "failed": "failed: no space"})
        until = time.monotonic() + 30
        while not own.lost and time.monotonic() < until:
            time.sleep(0.001)
        assert own.share(1) == [7]
        for _ in range(2):
            with pytest.raises(links.RankLost, match="rank 0 failed: no space"):
                own.share(1)


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("handlers")
def test_the_launcher_ends_all_ranks_where_one_fails(monkeypatch, tmp_path):
    launcher = import_module("numbsparse.distributed.__main__")
    monkeypatch.setattr(launcher, "PATIENCE", 0.2)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "rank = os.environ['RANK']\n"
        "open(sys.argv[1] + rank, 'w').write(f'{os.getpid()} {os.environ[\"WORLD_SIZE\"]}')\n"
        "sys.exit(3) if rank == '1' else time.sleep(60)\n"
    )
    began = time.monotonic()
    assert launcher.main(["--ranks", "3", str(program), str(tmp_path / "rank")]) == 3
    assert time.monotonic() - began < 30  # half of what the others sleep
    for path in tmp_path.glob("rank*"):  # one that ended early may have written nothing
        pid, size = path.read_text().split()
        assert size == "3"
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["term", "hup"])
def test_the_launcher_ends_all_ranks_where_it_is_told_to(number, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "path = sys.argv[1] + os.environ['RANK']\n"
        "open(path + '.new', 'w').write(f'{os.getpid()}')\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(60)\n"
    )
    ranks = [tmp_path / f"rank{rank}" for rank in range(2)]
    command = [sys.executable, "-m", "numbsparse.distributed", str(program), str(tmp_path / "rank")]
    with subprocess.Popen(command) as launcher:
        while not all(rank.exists() for rank in ranks):
            time.sleep(0.05)
            assert launcher.poll() is None
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) == 128 + number
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(int(rank.read_text()), 0)


@pytest.mark.slow
@pytest.mark.usefixtures("handlers")
def test_the_launcher_starts_a_module(monkeypatch, tmp_path):
    launcher = import_module("numbsparse.distributed.__main__")
    (tmp_path / "of_ranks.py").write_text(
        "import os, sys\n"
        "sys.exit(5 if sys.argv[1:] == ['-m', 'x'] and os.environ['RANK'] == '0' else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert launcher.main(["--ranks", "1", "-m", "of_ranks", "-m", "x"]) == 5


@pytest.mark.parametrize("names", environment.NAMES.values())
def test_what_launchers_say(names, monkeypatch):
    for name, value in zip(names, ("1", "3", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert environment.process()[1:] == (1, 3, 0)
    monkeypatch.setenv(names[0], "3")
    with pytest.raises(ValueError, match=f"{names[0]} takes a rank below {names[1]}, 3, got 3"):
        environment.process()
    monkeypatch.setenv(names[1], "many")
    with pytest.raises(ValueError, match="takes a whole number"):
        environment.process()


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_that_cannot_be(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ValueError, match=f"MASTER_PORT takes a number from 1 to 65535, got {port}"):
        environment.address()


def test_a_port_where_another_program_listens():
    """As of a second run on one host: rank 0 says where, at once."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = other.getsockname()
        with pytest.raises(RuntimeError, match=f"rank 0 cannot listen at 127.0.0.1:{at[1]}: .*in"):
            rendezvous.met(0, 2, {}, 1.0, at=at)


def test_bad_arguments():
    with pytest.raises(ValueError, match="backend takes"):
        dist.init("gloo")
    for timeout in (0, 1e10, float("inf")):
        with pytest.raises(ValueError, match="timeout takes"):
            dist.init(timeout=timeout)
    model = nn.Linear(8, 8, block_size=4)
    sgd = nn.optim.SGD(model.parameters(), lr=0.1)
    with dist.init() as group:
        x = np.ones((2, 3))
        for call, error, words in (
            (lambda: group.all_reduce(x, "product"), ValueError, "op takes 'sum', 'mean'"),
            (lambda: group.all_reduce(x > 0), TypeError, "x takes .* got bool"),
            (lambda: group.all_reduce(x.astype(int), "mean"), TypeError, "float64.* got int64"),
            (lambda: group.all_reduce(x, out=x[0]), ValueError, r"out takes \(2, 3\) of float64"),
            (lambda: group.all_reduce(x.T, out=x.copy().T), ValueError, "C-contiguous array, got"),
            (lambda: group.broadcast(x, root=1), ValueError, "root"),
            (lambda: group.broadcast(np.array([None])), TypeError, "x takes numbers"),
            (lambda: group.reduce_scatter(np.float64(1)), ValueError, "x takes a multiple of 1"),
            (lambda: group.split(-1), ValueError, "color takes"),
            (lambda: dist.DataParallel(None, group), TypeError, "model takes a numbsparse Module"),
            (lambda: dist.DataParallel(model, 2), TypeError, "group takes a numbsparse Group"),
            (lambda: dist.DataParallel(model, group, bucket=0), ValueError, "bucket takes"),
            (lambda: dist.ShardedOptimizer(model, group), TypeError, "optimizer takes a numbsp"),
            (lambda: dist.ShardedOptimizer(sgd, None), TypeError, "group takes a numbsparse Group"),
            (lambda: dist.ColumnLinear(model, "nccl"), TypeError, "group takes a numbsparse Group"),
        ):
            with pytest.raises(error, match=words):
                call()
        x.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            group.all_reduce(x, out=x)


def test_a_sharded_optimizer_refuses_what_it_does_not_follow():
    with dist.init() as group:
        model = nn.Linear(8, 8, layout=np.eye(2), block_size=4, seed=0)
        optimizer = dist.ShardedOptimizer(nn.optim.SGD(model.parameters(), lr=0.1), group)
        for call in (optimizer.remap, lambda: optimizer.add_param_group({})):
            with pytest.raises(NotImplementedError, match="make a new one"):
                call()
        model.weight.data = ns.BlockSparse(np.ones((2, 4, 4), np.float32), [[0, 1], [1, 0]])
        model(np.ones(8, np.float32)).sum().backward()
        with pytest.raises(ValueError, match="has another layout now"):
            optimizer.step()


def test_a_sharded_optimizer_takes_states_of_its_own_parameters_alone():
    with dist.init() as group:
        model = nn.Linear(8, 8, block_size=4, seed=0)
        optimizer = dist.ShardedOptimizer(nn.optim.Adam(model.parameters()), group)
        model(np.ones(8, np.float32)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        for bad, error, words in (
            (None, TypeError, "state takes what state_dict"),
            ({}, ValueError, "state lacks 'steps'"),
            ({k: v for k, v in state.items() if k != "param_groups"}, ValueError, "lacks 'param_g"),
            (state | {"2.m": state["0.m"]}, ValueError, "of another optimizer: it has '2.m'"),
            (state | {"x.y": 1}, ValueError, "of another optimizer: it has 'x.y'"),
        ):
            with pytest.raises(error, match=words):
                optimizer.load_state_dict(bad)
        optimizer.load_state_dict(state)


def test_a_split_lstm_refuses_what_an_lstm_does():
    lstm = nn.LSTM(8, 8, block_size=4, seed=0)
    split, (x, two) = dist.SplitLSTM(lstm), np.zeros((2, 3, 2, 8), np.float32)
    for wrong in ((x[0, 0], None), (x[:0], None), (x, 3), (x, (1.0, 2.0)), (x, (two, two[:1]))):
        with pytest.raises((TypeError, ValueError)) as of_lstm:
            lstm(*wrong)
        with pytest.raises(of_lstm.type) as of_split:
            split(*wrong)
        assert str(of_split.value) == str(of_lstm.value)


def test_a_leaf_s_gradient_comes_before_the_layers_below_are_gone_through():
    """Else there would be nothing to overlap."""
    from numbsparse.autograd import record
    from numbsparse.autograd.tape import gradients_of

    order = []
    weights = [nn.Parameter(np.ones(1)) for _ in range(3)]
    y = nn.Parameter(np.ones(1))
    for i, w in enumerate(weights):

        def vjp(dy, result, i=i):
            order.append(f"below {i}")
            return dy

        y = record(y.data * w.data, (w, lambda dy, result: dy), (y, vjp))
    for leaf, _ in gradients_of(y, ns.Tensor(np.ones(1)), False):
        order += [f"weight {i}" for i, w in enumerate(weights) if w is leaf]
    assert order == [f"{of} {i}" for i in (2, 1, 0) for of in ("weight", "below")]


def test_a_huge_layout_needs_no_dense_pattern():
    """Of 2^20 blocks on a side that would be a terabyte."""
    n = 2**20
    diagonal = ns.Layout.from_arrays(np.arange(n + 1), np.arange(n), (n, n))
    model = nn.Linear(4 * n, 4 * n, layout=diagonal, block_size=4, bias=False)
    with dist.init() as group:
        assert dist.DataParallel(model, group).model.weight.data.layout is diagonal
