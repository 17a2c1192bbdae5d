"""What the ranks of the tests do: each function runs on every rank, and alone."""

import io
import os
import signal
import socket
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path

import numpy as np

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import nn
from numbsparse.distributed import links
from numbsparse.distributed.links import HEADER
from numbsparse.distributed.on_host import BySockets
from numbsparse.dtypes import as_dtype, finfo

FLOATS = ("float16", "float32", "float64")
OPERATIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def init(timeout=30.0):
    return dist.init(os.environ.get("RANKS_BACKEND", "sockets"), timeout)


def drawn(rng, size, dtype, ranks):
    """The arrays of all ranks: each rank draws them all."""
    shape = (size * rng.integers(0, 4), *rng.integers(1, 5, rng.integers(0, 3)))
    return [(9 * rng.standard_normal(shape)).astype(as_dtype(dtype)) for _ in range(ranks)]


def collectives(seed, dtypes, places):
    """Each collective against NumPy in float64, new and in place, of arrays in any order."""
    with init() as group:
        rng = np.random.default_rng(seed)
        for dtype in dtypes:
            for place in places:
                for op in OPERATIONS:
                    parts = drawn(rng, group.size, dtype, group.size)
                    order = np.roll(np.arange(parts[0].ndim), rng.integers(3))
                    x = put(np.transpose(parts[group.rank], order.argsort()), place)
                    sums = reduced(parts, op)
                    check(
                        group.all_reduce(
                            x.transpose(order) if place == "cpu" else put(parts[group.rank], place),
                            op,
                        ),
                        *sums,
                    )
                    x = put(parts[group.rank], place)
                    check(group.all_reduce(x, op, out=x), *sums)
                    part = len(parts[0]) // group.size
                    mine = slice(group.rank * part, (group.rank + 1) * part)
                    x = put(parts[group.rank], place)
                    check(group.reduce_scatter(x, op), *(each[mine] for each in sums))
                    exact = np.concatenate(parts)
                    check(group.all_gather(x), exact)
                    holes = put(np.full(exact.shape, np.nan, exact.dtype), place)
                    assert group.all_gather(x, out=holes) is holes
                    check(holes, exact)
                    root = int(rng.integers(group.size))
                    check(group.broadcast(x, root), parts[root])
        return True


def put(array, place):
    return ns.to_device(array) if place == "cuda" else array.copy()


def reduced(parts, op):
    """The result in float64, and how far one in the dtype may be off."""
    wide = np.stack([part.astype(np.float64) for part in parts])
    exact, eps = OPERATIONS[op](wide, axis=0), float(finfo(parts[0].dtype).eps)
    summed = eps if parts[0].dtype.itemsize > 2 else 2**-23  # 16 bits in float32
    return exact, len(parts) * summed * np.abs(wide).sum(0) + eps / 2 * np.abs(exact)


def check(got, exact, bound=0.0):
    got = got if isinstance(got, np.ndarray) else got.numpy()
    assert got.shape == exact.shape
    assert (np.abs(got.astype(np.float64) - exact.astype(np.float64)) <= bound).all()


def same_everywhere(seed):
    """The bytes of a sum whose order matters."""
    with init() as group:
        x = np.random.default_rng([seed, group.rank]).standard_normal(999, dtype=np.float32)
        total = group.all_reduce(x * 10.0 ** (x * 3)).tobytes()
    try:
        group.all_reduce(x)
    except RuntimeError as error:
        assert "closed" in str(error)  # noqa: PT017  without pytest
        return total


def model_of(rank, dtype="float64", density=0.5):
    layout = ns.patterns.random(4, 16, density, seed=1)
    return nn.Sequential(
        nn.Linear(32, 128, layout=layout, block_size=8, dtype=dtype, seed=rank),
        nn.Tanh(),
        nn.Linear(128, 32, block_size=8, dtype=dtype, seed=rank + 50),
    )


def train(first, last, *, sharded=False, bucket=1 << 12, parts=1, load=None, path=None, lr=0.01):
    """Weights after steps of Adam on a batch of 12, which the ranks share, each in `parts`."""
    with init() as group:
        model = model_of(0 if load else group.rank)
        parallel = dist.DataParallel(model, group, bucket=bucket)
        others = {"betas": (0.1, 0.2), "weight_decay": 0.5} if load else {}  # the state's count
        optimizer = nn.optim.Adam(model.parameters(), lr=lr, **others)
        optimizer = dist.ShardedOptimizer(optimizer, group) if sharded else optimizer
        if load:
            state = ns.load(load)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(first, last):
            x = np.random.default_rng(step).standard_normal((12, 32))
            mine = np.split(np.split(x, group.size)[group.rank], parts)
            model.zero_grad()
            with parallel.no_sync():
                for part in mine[:-1]:
                    backward(parallel, part, parts)
            backward(parallel, mine[-1], parts)
            nn.utils.clip_grad_norm(model.parameters(), 0.5)
            optimizer.lr = lr / (1 + step)
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if path:
            dist.save(path, state, group)
        return flat(state)


def trainings(ways):
    """Several of them in turn, each by a group of its own."""
    return [train(*steps, **how) for steps, how in ways]


def backward(model, x, parts):
    y = model(x)
    (((y - x) * (y - x)).mean() / parts).backward()


def flat(state):
    """All arrays of a state dict, one after the other."""
    if isinstance(state, dict):
        return np.concatenate([flat(state[key]) for key in sorted(state)])
    if isinstance(state, list | tuple):
        return np.concatenate([flat(each) for each in state])
    return np.ravel(state.values if isinstance(state, ns.BlockSparse) else state).astype(float)


def apart():
    """A layer whose ranks drew layouts and values of their own, its gradient, and a buffer that is
    every other number of an array."""
    with init() as group:
        layout = ns.patterns.random(6, 6, 0.4, seed=group.rank)
        model = nn.Linear(24, 24, layout=layout, block_size=4, dtype="float64", seed=group.rank)
        model.register_buffer("seen", (np.arange(6.0) + 10 * group.rank)[::2])
        dist.DataParallel(model, group)
        model(np.ones((2, 24))).sum().backward()
        return (
            model.weight.data.toarray(),
            model.weight.grad.data.layout.pattern,
            model.seen.numpy(),
        )


def half(sharded):
    """A captured step on a GPU, in float16 with a scale that one rank's infinity halves."""
    with init() as group:
        model = nn.Linear(8, 8, block_size=4, dtype="float16", seed=group.rank).to("cuda")
        dist.DataParallel(model, group)
        optimizer = nn.optim.Adam(model.parameters(), lr=0.01)
        optimizer = dist.ShardedOptimizer(optimizer, group) if sharded else optimizer
        scaler = nn.optim.LossScaler(256.0)

        def update(x):
            y = model(x)
            model.zero_grad()
            scaler.scale((y * y).mean()).backward()
            scaler.step(optimizer)

        captured = ns.graph(update)
        for step in range(2):
            x = np.random.default_rng(step).standard_normal((2, 8)).astype(np.float16)
            x[1, 0] = np.inf if step else x[1, 0]
            captured(np.split(x, group.size)[group.rank])
        return flat(optimizer.state_dict()), scaler.state_dict()["scale"]


def masks():
    """What dropout draws, and what is saved of it."""
    with init() as group:
        model = nn.Sequential(nn.Dropout(0.5, seed=7 + group.rank), nn.Linear(64, 4, block_size=4))
        dist.DataParallel(model, group)
        return model[0](np.ones(64)).numpy(), model.state_dict()["0.seed"]


def other(what, folder=None):
    """Rank 1 differs; gives the seconds until this rank knows."""
    rank = int(os.environ["RANK"])
    odd, began = rank == 1, time.monotonic()
    # Only who waits elsewhere is ended by the thread; the others end by themselves, if late.
    links.GRACE, version = 1.0 if what == "busy" else 25.0, ns.__version__
    ns.__version__ = "0.0.1" if what == "version" and odd else version
    try:
        joining = init()
    finally:
        ns.__version__ = version
    with joining as group:
        path = os.path.join(folder or "", "checkpoint.npz")
        if what == "call":
            group.all_gather(np.ones(3)) if odd else group.all_reduce(np.ones(3))
        if what == "shape":
            group.all_reduce(np.ones(3 + odd))
        if what == "saving":
            dist.save(os.path.join(path, "missing"), {"a": 1}, group)
        density = 0.25 if what == "layout" and odd else 0.5
        model = model_of(0, "float32" if what == "dtype" and odd else "float64", density)
        dist.DataParallel(model, group)
        if what == "layout":  # all have that of rank 0, until one has another
            model[0].weight.data = model_of(0, density=density)[0].weight.data
        if what == "one layout" and odd:
            model[0].weight.data = model_of(0, density=0.25)[0].weight.data
        dist.save(path, {"step": 1}, group)
        if what == "reached":
            (model[0] if odd else model)(np.ones((2, 32))).sum().backward()
        model(np.ones((2, 32))).sum().backward()
        if what == "skipped":
            (model[0] if odd else model)(np.ones((2, 32))).sum().backward()
        if odd and what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if odd and what == "memory":
            raise MemoryError("9 GiB were asked for")
        if odd and what == "left":
            return time.monotonic() - began
        if not odd and what == "busy":  # in something that is no collective, such as a GPU's wait
            time.sleep(60)
        if odd and what == "busy":
            os.kill(os.getpid(), signal.SIGKILL)
        model(np.ones((2, 32))).sum().backward()
    return time.monotonic() - began


class Deaf(BySockets):
    """Collectives that wait for the other ranks, whatever those call meanwhile, as NCCL's do."""

    name = "mpi"


def layouts_set(by, captured=False, place="cpu"):
    """Some ranks set other layouts before their third pass; gives how many blocks there are.

    They come to it when the others have begun it, which wait for their gradient.
    """
    links.GRACE = 25.0 if int(os.environ["RANK"]) in by else 0.2
    with dist.init("nccl", 60.0) if place == "cuda" else init() as group:
        if place == "cpu":
            group._host = Deaf(group.split(0)._links)
            group._parts.clear()  # whose links would else tell the other rank
        model, other = (model_of(0, "float32", density).to(place) for density in (0.5, 0.25))
        dist.DataParallel(model, group)
        x = put(np.ones((2, 32), np.float32), place)

        def step():
            model.zero_grad()
            backward(model, x, 1)

        step = ns.graph(step) if captured else step
        for nth in range(6):
            if nth == 4 and group.rank in by:
                time.sleep(0.4)
                model[0].weight.data = other[0].weight.data
            step()
        if place == "cuda":
            ns.synchronize()
        return model[0].weight.grad.data.n_blocks


def caught():
    """A rank that knows of the loss goes on for as long as it likes."""
    links.GRACE = 1.0
    group = init()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except dist.RankLost as error:
        time.sleep(1.5)
        return str(error)


def buckets(sizes):
    """For each size of a bucket, how many values each reduction of the second backward has."""
    return [reductions(bucket) for bucket in sizes]


def counting(group):
    """A list that gets the number of values of each reduction by this group."""
    counts, all_reduce = [], group.all_reduce

    def counted(x, *args, **options):
        counts.append(x.size)
        return all_reduce(x, *args, **options)

    if group.size > 1:  # else it stays, and is for others too
        group.all_reduce = counted
    return counts


def lstm(bucket):
    """The gradients of an LSTM on 4 sequences, added up over three passes, and the reductions."""
    with init() as group:
        layout = ns.patterns.random(6, 6, 0.4, seed=0)
        model = nn.LSTM(8, 24, layout=layout, block_size=4, dtype="float64", seed=group.rank)
        parallel, reductions = dist.DataParallel(model, group, bucket=bucket), counting(group)
        x, found = np.random.default_rng(0).standard_normal((3, 4, 8)), []
        for step in range(3):
            if step != 1:  # else they are added to those before
                model.zero_grad()
            y, _ = parallel(x[:, group.rank * 4 // group.size :][:, : 4 // group.size])
            (y * y).mean().backward()
            found.append([p.grad.values.ravel() for p in model.parameters()])
        return np.concatenate([a for each in found for a in each]), reductions


def reductions(bucket):
    with init() as group:
        parallel = dist.DataParallel(model_of(0), group, bucket=bucket)
        backward(parallel, np.ones((2, 32)), 1)
        counts = counting(group)
        with parallel.no_sync():
            backward(parallel, np.ones((2, 32)), 1)
        assert not counts
        backward(parallel, np.ones((2, 32)), 1)
        return counts


def example(name, arguments):
    """What a program of examples/ gives; what it prints is dropped."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import_module("letter_training").ROUNDS = 1  # of timing
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return import_module(name).main(arguments)


def alone(timeout):
    with init(timeout=timeout):
        pass


def missing(comes):
    """Of two ranks only one comes."""
    if int(os.environ["RANK"]) == comes:
        alone(0.5)


def split():
    """What parts of a group sum up, and each rank's number and size there."""
    with init() as group:
        parts = group.split(group.rank // 2), group.split(group.rank % 2), group.split(group.rank)
        sums = [part.all_reduce(np.full(2, 10.0**group.rank)) for part in parts]
        return [
            (part.rank, part.size, total.tolist()) for part, total in zip(parts, sums, strict=True)
        ]


def knocked():
    """Rank 1 comes after others who knock at the port, and say nothing, or what is no message."""
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "1":
        while True:
            with suppress(OSError):
                silent = socket.create_connection(("127.0.0.1", port))
                break
            time.sleep(0.01)
        for words in (b"GET / HTTP/1.1\r\n\r\n" + b" " * 99, HEADER.pack(2, 0) + b"[]"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(words)
        with silent:
            return alone(30.0)
    return alone(30.0)


def cards(bucket=1 << 10):
    """The gradients of an LSTM of which each rank has a part of 8 sequences, on a GPU of its own.

    Of three backward passes as they are, and of a captured step, which is replayed.
    """
    with dist.init("nccl" if "RANK" in os.environ else "auto", 60.0) as group:
        layout = ns.patterns.random(6, 6, 0.4, seed=0)
        model = nn.LSTM(8, 48, layout=layout, block_size=8, seed=group.rank).to("cuda")
        if group.size > 1:
            dist.DataParallel(model, group, bucket=bucket)
        step, found = ns.graph(lambda x: passes(model, x)), []
        for seed in range(6):
            x = np.random.default_rng(seed).standard_normal((3, 8, 8)).astype(np.float32)
            x = ns.to_device(np.split(x, group.size, axis=1)[group.rank])
            passes(model, x) if seed < 3 else step(x)
            found += [p.grad.values.numpy().ravel() for p in model.parameters()]
        return np.concatenate(found)


def passes(model, x):
    y, _ = model(x)
    model.zero_grad()
    (y * y).mean().backward()


def waiting(peer_memory, wait):
    """Rank 1 is killed while the GPU of rank 0 waits for it, and its program for one of both."""
    links.GRACE = 1.0
    with dist.init("nccl", 60.0) as group:
        model = nn.LSTM(8, 48, block_size=8, seed=0).to("cuda")
        if peer_memory:
            model = dist.SplitLSTM(model, group, peer_memory=True)
        else:
            dist.DataParallel(model, group)
        x = ns.to_device(np.ones((3, 4, 8), np.float32))
        for step in range(4):
            if group.rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            passes(model, x)
            ns.synchronize() if step < 3 or wait == "GPU" else group.barrier()


def after_a_fork():
    """A collective after a process that was forked here has left its copy of the group."""
    with init() as group:
        if (child := os.fork()) == 0:
            group.close()
            os._exit(0)
        os.waitpid(child, 0)
        return float(group.all_reduce(np.ones(1))[0])
