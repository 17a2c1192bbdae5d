"""Products that come again on the same memory: their launches are started, and all is the same."""

import ctypes
import gc
import importlib
import threading
import weakref

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device
from numbsparse.device import launch, memory, replay, runtime, streams
from numbsparse.kernels.elementwise import fill
from numbsparse.ops import choice
from numbsparse.ops.index import index_beside

pytestmark = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")
products = importlib.import_module("numbsparse.ops.matmul")
B, N = 4, 8


@pytest.fixture(autouse=True)
def one_gpu():
    if runtime.several_devices:
        pytest.skip("nothing is started again in a process that has used several GPUs")


@pytest.fixture
def worked_out(monkeypatch):
    """The products that were not only started."""
    seen, run = [], products._run
    monkeypatch.setattr(products, "_run", lambda *of: seen.append(of) or run(*of))
    return seen


def weight(seed=0, pattern=((1, 0), (1, 1))):
    layout = ns.Layout(np.array(pattern))
    host = np.random.default_rng(seed).standard_normal((layout.n_blocks, B, B), np.float32)
    return ns.BlockSparse(host, layout).to("cuda")


def drawn(*shape, seed=0):
    return ns.to_device(np.random.default_rng(seed).standard_normal(shape, np.float32))


def nans(*shape):
    return ns.to_device(np.full(shape, np.nan, np.float32))


def check(y, x, dense, precision="highest"):
    x, dense = x.numpy().astype(np.float64), dense.astype(np.float64)
    rounded = 0 if precision == "highest" else 2.0**-9
    bound = (2.0**-23 * (x.shape[-1] + 9) + rounded) * (abs(x) @ abs(dense))
    assert (abs(y.numpy() - x @ dense) <= bound).all()


def test_what_came_before_is_started_with_what_memory_holds_now(worked_out, monkeypatch):
    w, x, y = weight(), drawn(4, N), nans(4, N)
    for i in range(6):
        device.refill(x, drawn(4, N, seed=i))
        device.refill(w.values, drawn(*w.values.shape, seed=10 + i))
        device.refill(y, nans(4, N))
        assert ns.matmul(x, w, out=y) is y
        check(y, x, w.toarray())
    assert len(worked_out) == 3  # the index goes to the GPU; it comes again, and is recorded
    monkeypatch.setattr(products, "empty_quickly", lambda x, shape: y)  # memory that is free again
    for _ in range(3):
        device.refill(y, nans(4, N))
        check(ns.matmul(x, w), x, w.toarray())
    assert len(worked_out) == 3


HOW = {"kernel_size": 3, "padding": 1}
TAPS = ns.Layout(ns.patterns.taps(np.array([[1, 0], [1, 1]]), (3,)))
ROWS = ns.Layout([[1, 1], [0, 1]])
AGAIN = {  # of x and dy (images, pixels, features) and a weight
    "conv": lambda x, dy, w: ns.conv(x, w, **HOW),
    "conv_transpose": lambda x, dy, w: ns.conv_transpose(dy, w, **HOW),
    "conv_weight_grad": lambda x, dy, w: ns.conv_weight_grad(x, dy, w, **HOW).values,
    "sddmm": lambda x, dy, w: ns.sddmm(x[0].T, dy[0], ROWS).values,
}


@pytest.mark.parametrize("name", AGAIN)
def test_convolutions_and_weight_gradients_are_started_too(name, monkeypatch):
    call, seen, memory = AGAIN[name], [], {}

    def place(layout, array, beside=index_beside):
        seen.extend([array] if isinstance(array, ns.DeviceArray) else [])
        return beside(layout, array)

    def free_again(shape, like):  # as a result that was let go of
        if isinstance(like, np.ndarray):
            return np.full(shape, np.nan, like.dtype)
        return memory.setdefault(shape, nans(*shape))

    for module in map(importlib.import_module, ("numbsparse.ops.conv", "numbsparse.ops.sddmm")):
        monkeypatch.setattr(module, "index_beside", place)
        monkeypatch.setattr(module, "empty_beside", free_again)
    x, dy = drawn(2, 9, 16), drawn(2, 9, 16)
    w = ns.BlockSparse(drawn(TAPS.n_blocks, 8, 8), TAPS)
    for pixels in (9, 4):  # of views with gaps
        before = len(seen)
        for i in range(5):  # worked out three times at most, and recorded
            for seed, a in enumerate((x, dy, w.values, *memory.values())):
                device.refill(a, drawn(*a.shape, seed=10 * i + seed))
            of = x[:, :pixels], dy[:, :pixels]
            expected = call(*(a.numpy() for a in of), w.to("cpu"))
            np.testing.assert_allclose(call(*of, w).numpy(), expected, rtol=0, atol=1e-5)
        assert len(seen) - before <= 3


@pytest.mark.slow
def test_products_in_any_order_are_told_apart(rng):
    w, square = weight(), drawn(N, N)
    tensors = [weight(pattern=((1, 0), (1, 1))), w, w.T]
    outs = [nans(N, N), nans(N, N)]
    views = [square, square.T, square[:4], square[4:8], square[:, :N], square[::2], square[0]]
    for _ in range(60):
        x, v = views[rng.integers(len(views))], tensors[rng.integers(3)]
        precision = ("highest", "high")[rng.integers(2)]
        out = outs[rng.integers(2)]
        if rng.integers(3) == 0 and x.shape[0] == N:
            out = out if x.ndim == 2 else out[0]
            ns.matmul(v, x, out=out, precision=precision)
            check(
                out.T if x.ndim == 2 else out, x.T if x.ndim == 2 else x, v.toarray().T, precision
            )
        else:
            out = out[: x.shape[0]] if x.ndim == 2 else out[0]
            ns.matmul(x, v, out=out, precision=precision)
            check(out, x, v.toarray(), precision)
        device.refill(outs[0], nans(N, N))
        device.refill(outs[1], nans(N, N))


def test_what_is_refused_is_refused_again(worked_out):
    w, x, y = weight(), drawn(4, N), nans(4, N)
    for _ in range(4):
        ns.matmul(x, w, out=y)
    half = ns.BlockSparse(w.values.view(np.int32).view(np.float32), w.layout)
    ns.matmul(x, half, out=y)  # the same values by another view
    for call, error in (
        (lambda: ns.matmul(x.view(np.int32), w, out=y), TypeError),
        (lambda: ns.matmul(x, w, out=x), ValueError),
        (lambda: ns.matmul(x[:, :4], w), ValueError),
        (lambda: ns.matmul(x, w, out=y[:2]), ValueError),
    ):
        for _ in range(3):
            with pytest.raises(error):
                call()


def test_work_that_reads_memory_is_worked_out_each_time():
    known, array, other = {}, nans(4), nans(4)

    def work():
        fill(other, 0)
        other.numpy()

    for _ in range(2 + replay.TRIES):
        replay.replayed(known, (), (array,), work)
    (found,) = known.values()
    assert (found.is_whole, found.tries, found.held) == (False, replay.TRIES, [])


def test_work_that_copies_at_first_is_started_later():
    """As where a plan is made for memory that the work takes for itself."""
    known, array, done = {}, nans(4), []

    def work():
        done.append(None)
        fill(array, 1)
        if len(done) < 3:
            array.numpy()

    for _ in range(6):
        device.refill(array, nans(4))
        replay.replayed(known, (), (array,), work)
        assert not np.isnan(array.numpy()).any()
    assert len(done) == 3


def test_work_on_much_memory_is_worked_out_each_time(monkeypatch):
    """What is started again would hold it."""
    monkeypatch.setattr(replay, "MOST_BYTES", 64)
    for n, is_whole in ((16, True), (17, False)):
        known, array = {}, nans(n)

        def work(n=n, array=array):
            fill(device.empty((n,), "float32"), 1)
            fill(array, n)

        for _ in range(5):
            device.refill(array, nans(n))
            replay.replayed(known, (), (array,), work)
            assert (array.numpy() == n).all()
        assert [*known.values()][-1].is_whole == is_whole


def test_memory_that_work_takes_for_itself_is_its_own(monkeypatch):
    monkeypatch.setattr(replay, "_arenas", weakref.WeakValueDictionary())  # none of before
    w, known, calls, run = weight(), {}, [], products._run
    outs = [nans(4, N) for _ in range(2)]

    def work(number):
        calls.append(number)
        x = device.empty((4, N), "float32")
        fill(x, number)
        run(x, w, outs[number], False, "auto", "highest")

    def all_of_them():
        for number, out in enumerate(outs):
            device.refill(out, nans(4, N))
            replay.replayed(known, (number,), (out,), lambda number=number: work(number))
        others = [nans(4, N) for _ in range(3)]  # no memory of theirs
        for number, out in enumerate(outs):
            check(out, device.moved(np.full((4, N), number, np.float32), "cuda"), w.toarray())
        return others

    for _ in range(5):
        all_of_them()
    assert calls == [0, 1] * 3  # as above
    thread = threading.Thread(target=all_of_them)  # at the same time it would write there too
    thread.start()
    thread.join()
    assert calls == [0, 1] * 4
    arenas = [weakref.ref(arena) for arena in replay._arenas.values()]
    assert len(arenas) == 1
    known.clear()
    gc.collect()
    assert arenas[0]() is None


def test_operands_are_not_kept_alive():
    w, x, y = weight(), drawn(4, N), nans(4, N)
    owners = [weakref.ref(a.owner) for a in (x, y, w.values)]
    for _ in range(5):
        ns.matmul(x, w, out=y)
    layout = w.layout
    assert any(found.is_whole for found in layout.device_index.replays.values())
    del x, y, w
    gc.collect()
    assert [owner() for owner in owners] == [None] * 3


def test_a_choice_that_is_made_anew_is_seen(worked_out):
    w, x, y = weight(), drawn(4, N), nans(4, N)
    for _ in range(4):
        ns.matmul(x, w, out=y)
    before = len(worked_out)
    choice.forget()
    ns.matmul(x, w, out=y)
    assert len(worked_out) == before + 1


def test_a_captured_step_takes_nothing_that_is_known(worked_out):
    w, x = weight(), drawn(4, N)
    for _ in range(5):
        ns.matmul(x, w)
    before = len(worked_out)
    step = ns.graph(lambda x: ns.matmul(x, w))
    for _ in range(3):
        check(step(x), x, w.toarray())
    assert len(worked_out) > before


def test_threads_record_what_is_theirs():
    w, known = weight(), {}
    x, y, other, others = drawn(4, N), nans(4, N), drawn(4, N, seed=1), nans(4, N)
    run = products._run

    def elsewhere():
        with streams.DEFAULT.context():
            run(other, w, others, False, "auto", "highest")

    def work():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        run(x, w, y, False, "auto", "highest")

    run(x, w, y, False, "auto", "highest")
    for _ in range(2):
        replay.replayed(known, (), (x, w.values, y), work)
    (found,) = known.values()
    assert len(found.starts) == 1
    device.refill(others, nans(4, N))
    device.refill(y, nans(4, N))
    found.start((x, w.values, y), streams.DEFAULT)
    check(y, x, w.toarray())
    assert np.isnan(others.numpy()).all()


def test_a_launch_that_is_started_again_has_arguments_of_its_own(monkeypatch):
    seen = []

    def start(config, function, pointers, extra):
        first = ctypes.c_void_p.from_address(pointers).value
        seen.append((config, function, ctypes.c_int64.from_address(first).value))
        return (0,)

    slots = launch.Slots(bytes(8))

    class Prepared:
        lock, function = threading.Lock(), "kernel"
        values, pointers = slots.values, slots.pointers

    prepared = [Prepared()]
    numbers = iter((b"\7" + bytes(7), b"\5" + bytes(7), b"\3" + bytes(7)))
    monkeypatch.setattr(runtime, "SIMULATED", False)
    monkeypatch.setattr(launch, "_launcher", lambda: (start, lambda *how: how[-1]))
    monkeypatch.setattr(launch, "_prepare", lambda *of: (prepared[0], next(numbers)))
    known, x = {}, device.DeviceArray(512, (1,), np.float32)
    for _ in range(2):
        replay.replayed(known, (), (x,), lambda: launch.launch(None, 1, 1, 0))
    launch.launch(None, 1, 1, 0)
    alive = weakref.ref(prepared.pop())
    gc.collect()
    assert alive() is not None, "a kernel whose code is gone would be started"
    replay.replayed(known, (), (x,), None)
    assert seen == [(1, "kernel", n) for n in (7, 5, 3, 5)]


def test_streams_are_told_apart_and_wait_for_what_is_used(monkeypatch):
    monkeypatch.setattr(streams, "several", True)
    noted = []
    monkeypatch.setattr(memory, "note", lambda owners, stream=None: noted.append((owners, stream)))
    w, x, y = weight(), drawn(4, N), nans(4, N)
    ns.matmul(x, w, out=y)
    replays = w.layout.device_index.replays  # which equal layouts share
    before = sum(map(bool, replays.values()))
    # Of handles that are none the driver reads what it takes for a stream, and dies.
    pair = (0x100, 0x200) if device.SIMULATED else (ns.stream(), ns.stream())
    for side in map(ns.stream, pair):
        with side:
            for _ in range(4):
                noted.clear()
                ns.matmul(x, w, out=y)
            ((owners, stream),) = noted
            assert stream is device.current_stream()
            assert {x.owner, w.values.owner, y.owner} <= set(owners)
            index = w.layout.device_index
            assert index.rows.indptr.owner in set(owners) | {index.rows.indptr.owner}
    assert sum(map(bool, replays.values())) == before + 2
