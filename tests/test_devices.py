"""Several GPUs: each operation runs where its arrays are, with what is there; all else is refused.

GPU 0 is the current one, and work is on GPU 1 as a rule. In the simulator memory has a GPU's
number, and a kernel takes no array of another GPU's: so nothing of GPU 0 is used on GPU 1.
"""

import pickle
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import host
from devices_helpers import X, two  # noqa: F401
from drawn import draws
from drawn_functions import BOTH, OF_ARRAYS, OF_TENSORS
from drawn_helpers import seeds
from hypothesis import given
from hypothesis import strategies as st

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.device import interop, launch, memory, runtime, streams
from numbsparse.kernels.matmul import PRODUCTS, RUNGS
from numbsparse.nn import functional as F
from numbsparse.ops import choice, tuned

TABLE = [(ops, m) for m in BOTH + OF_ARRAYS] + [(F, m) for m in BOTH + OF_TENSORS]
IDS = [f"{room.__name__.rpartition('.')[2]}.{m.name}" for room, m in TABLE]
GPUS = "cuda:0", "cuda:1"


def placed(a, where):
    return ns.to_device(a, where) if isinstance(a, np.ndarray) else a


def flat(result):
    """The arrays of a result."""
    if isinstance(result, list | tuple):
        return [a for part in result for a in flat(part)]
    return [getattr(result, "data", result)]


@pytest.mark.parametrize(("room", "meaning"), TABLE, ids=IDS)
def test_functions(room, meaning):
    """On either GPU the same bits, and gradients; arrays of both are refused by name."""
    function = getattr(room, meaning.name)

    @draws(1, "devices", meaning.name)
    @given(st.data(), seeds)
    def drawn(data, seed):
        arrays, others = meaning.inputs(data.draw, np.random.default_rng(seed))
        others = {**others, "dtype": "float16"} if "dtype" in others else others
        results = []
        for where in GPUS:
            there = [placed(a.astype(np.float32), where) for a in arrays]
            beside = {name: placed(other, where) for name, other in others.items()}
            given_ = [ns.Tensor(a, requires_grad=True) for a in there] if room is F else there
            result = flat(meaning.call(function, given_, beside))
            assert {a.device for a in result} <= {where}
            results.append([a.numpy() for a in result])
            assert device.current_stream().device == 0
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)
        if len(there) > 1 and "number" not in others and meaning.name != "cross_entropy":
            there[1] = there[1].to("cuda:0")
            with pytest.raises(ValueError, match=r"an array on cuda:1, where .* got one on cuda:0"):
                meaning.call(function, there, beside)

    drawn()


W = ns.BlockSparse(np.arange(3 * 32 * 32).reshape(3, 32, 32).astype("f2") % 7, [[1, 0], [1, 1]])
OF_8 = ns.BlockSparse(np.arange(3 * 8 * 8).reshape(3, 8, 8).astype("f2") % 7, [[1, 0], [1, 1]])


RUNGS_HERE = [name for name, home in RUNGS.items() if home == "cuda"]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("rung", RUNGS_HERE)
def test_rungs(rung, product):
    """One layout, and so one plan, for both GPUs in turn: the same bits, each with its own."""
    if device.SIMULATED and RUNGS_HERE.index(rung) % 3 != PRODUCTS.index(product):
        pytest.skip("simulated threads are slow: of each rung one product")
    w = OF_8 if rung in ("k7_small_blocks", "k9_dense_tiles") else W
    x = np.arange(8 * w.shape[0]).reshape(8, -1).astype("f2") % 5
    results = []
    for where in GPUS[::-1]:
        own, a = w.to(where), ns.to_device(x, where)
        if product == "weight_grad":
            y = ns.sddmm(a.T, a, own, kernel=rung).values
        else:
            y = ns.matmul(a, own if product == "forward" else own.T, kernel=rung)
        assert y.device == where
        results.append(y.numpy())
    np.testing.assert_array_equal(*results)


TAPS = ns.BlockSparse(np.ones((3, 4, 4), np.float32), np.ones((3, 1)))
SQUARE = ns.BlockSparse(np.ones((3, 4, 4), np.float32), [[1, 0], [1, 1]])
IMAGE = np.ones((1, 5, 4), np.float32)
CALLS = {  # a, b on one GPU: a result there
    "matmul": (X, SQUARE, ns.matmul),
    "features first": (X.T.copy(), SQUARE, lambda a, w: w.T @ a),
    "sddmm": (X.T.copy(), X, lambda a, b: ns.sddmm(a, b, SQUARE.layout).values),
    "conv": (IMAGE, TAPS, lambda a, w: ns.conv(a, w, kernel_size=3)),
    "conv_transpose": (IMAGE, TAPS, lambda a, w: ns.conv_transpose(a, w, kernel_size=3)),
    "conv_weight_grad": (
        IMAGE, IMAGE[:, :3], lambda a, b: ns.conv_weight_grad(a, b, TAPS, kernel_size=3).values
    ),
    "gate": (np.float32([1, 0, 2]), SQUARE, lambda g, w: ns.matmul(X, w, gate=g, out=out(w))),
    "w + v": (SQUARE, SQUARE, lambda w, v: (w + v - 2 * v).values),
    "F.sum": (SQUARE, SQUARE, lambda w, v: F.sum(ns.Tensor(w), 0).data),
    "w.sum": (SQUARE, SQUARE, lambda w, v: w.sum(0)),
    "remap": (SQUARE, SQUARE, lambda w, v: w.remap([[1, 1], [0, 1]]).values),
    "norms": (SQUARE, SQUARE, lambda w, v: w.block_norms("l1")),
    "w[...]": (SQUARE, SQUARE, lambda w, v: w[4:].values),
    "transposed data": (SQUARE, SQUARE, lambda w, v: w.T.data),
    "astype": (SQUARE, SQUARE, lambda w, v: w.astype("float16").copy().values),
}  # fmt: skip


def out(w):
    return ns.to_device(np.zeros((2, 8), np.float32), w.device)


def sent(a, where):
    return a.to(where) if isinstance(a, ns.BlockSparse) else ns.to_device(a, where)


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    a, b, call = CALLS[name]
    results = [call(sent(a, where), sent(b, where)) for where in GPUS]
    assert [y.device for y in results] == list(GPUS)
    np.testing.assert_array_equal(*(y.numpy() for y in results))
    if a is not b:
        match = r"(\w+) takes an array on cuda:[01], where \w+ is, got one on cuda:[01]: move it"
        with pytest.raises(ValueError, match=match):
            call(sent(a, "cuda:0"), sent(b, "cuda:1"))


def test_an_operand_within_a_named_tuple_is_named():
    w = ns.BlockSparse(np.ones((4, 4, 4), np.float32), np.ones((1, 4)))
    x, h = ops.zeros((1, 2, 4), "float32", "cuda:0"), ops.zeros((2, 4), "float32", "cuda:0")
    bias = ops.zeros((16,), "float32", "cuda:1")
    with pytest.raises(ValueError, match="bias takes an array on cuda:0, where weight_hh is"):
        ops.lstm(x, ops.LSTMCells(w.to("cuda:0"), bias, w.to("cuda:0")), h, h)


class Theirs:
    """An array of another library's, on GPU 1."""

    def __init__(self, array):
        self.array, self.lent_on = array, []

    @property
    def __cuda_array_interface__(self):
        self.lent_on.append(device.current_stream().device)
        return self.array.__cuda_array_interface__

    def __dlpack_device__(self):
        return 2, self.array.device_id


def test_arrays_of_others_are_read_where_they_are():
    theirs = Theirs(ns.to_device(X, "cuda:1"))
    assert device.as_device_array(theirs).device == ns.Tensor(theirs).device == "cuda:1"
    assert theirs.lent_on[-2:] == [1, 1]
    assert ns.matmul(theirs, SQUARE.to("cuda:1")).device == "cuda:1"
    with pytest.raises(
        ValueError, match="x takes an array on cuda:0, where w is, got one on cuda:1"
    ):
        ns.matmul(theirs, SQUARE.to("cuda:0"))
    # Of the host an operand goes where the weight is.
    y = ns.matmul(X, SQUARE.to("cuda:1"), out=ns.to_device(X, "cuda:1"))
    assert y.device == "cuda:1"
    np.testing.assert_array_equal(y.numpy(), X @ SQUARE)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4, layout=[[1]], block_size=4, update_dropout=0.5, seed=1)
        self.drop = nn.Dropout(0.25, seed=3)
        self.last = nn.Linear(4, 4, layout=[[1]], block_size=4, seed=2)

    def forward(self, x):
        y, _ = self.rnn(x)
        return self.last(self.drop(y))


def trained(where, captured, steps=2):
    """Parameters after some steps, all on one GPU."""
    model = Model().to(where)
    optimizer = nn.optim.AdamW(model.parameters(), lr=0.01)
    scaler = nn.optim.LossScaler()

    def step(x, target):
        loss = F.mse_loss(model(x), target)
        model.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm(model.parameters(), 1.0, scaler=scaler)
        scaler.step(optimizer)
        return loss

    call = ns.graph(step) if captured else step
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = ns.to_device(rng.standard_normal((1, 2, 4), np.float32), where)
        assert call(x, ns.Tensor(x)).device == where
    assert {p.device for p in model.parameters()} == {where}
    assert {s.device for slots in optimizer._state.values() for s in slots.values()} == {where}
    return [host(p.data) for p in model.parameters()], optimizer, model


def test_training():
    """As it is and captured."""
    one, other = trained("cuda:1", True)[0], trained("cuda:0", False)[0]
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_moves_between_gpus_and_trains_on():
    _, optimizer, model = trained("cuda:1", False, 1)
    model.to("cuda:0")
    x = ns.to_device(np.ones((1, 2, 4), np.float32), "cuda:0")
    model(x).sum().backward()
    optimizer.step()
    assert {s.device for slots in optimizer._state.values() for s in slots.values()} == {"cuda:0"}
    with pytest.raises(ValueError, match="x takes the device of the weights, cuda:0, got cuda:1"):
        model(x.to("cuda:1"))


def test_an_optimizer_takes_parameters_of_both():
    parameters = [nn.Parameter(ns.to_device(np.ones(5, np.float32), where)) for where in GPUS]
    optimizer = nn.optim.Adam(parameters, lr=0.5)
    for _ in range(2):
        for p in parameters:
            p.grad = ns.Tensor(ns.to_device(np.ones(5, np.float32), p.device))
        optimizer.step()
    np.testing.assert_array_equal(*(p.data.numpy() for p in parameters))
    parameters[0].grad = ns.Tensor(ns.to_device(np.ones(5, np.float32), "cuda:1"))
    with pytest.raises(ValueError, match=r"parameters\[0\].grad takes the device .* cuda:0"):
        optimizer.step()


def test_a_captured_step_works_on_one_gpu():
    x = ns.to_device(X, "cuda:1")

    def step(x):
        return ops.add(x, 1.0), ops.add(x.to("cuda:0"), 1.0)

    step = ns.graph(step)
    step(x)  # runs as it is
    with pytest.raises(RuntimeError, match=r"one GPU, this one on cuda:1, .* on cuda:0"):
        step(x)
    assert device.current_stream().device == 0


def test_a_step_is_captured_for_each_gpu():
    step = ns.graph(lambda x: ops.multiply(x, 2.0))
    for _ in range(3):
        for where in GPUS:
            y = step(ns.to_device(X, where))
            assert y.device == where
            np.testing.assert_array_equal(y.numpy(), 2 * X)
    assert [each.stream.device for each in step._recordings.values()] == [0, 1]
    with pytest.raises(ValueError, match=r"arguments\[0\] is, got one on cuda:1"):
        ns.graph(ops.add)(*(ns.to_device(X, where) for where in GPUS))


def test_copies_between_gpus():
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = ns.to_device(a)
    for view, right in ((x, a), (x.T, a.T), (x[1:, ::2], a[1:, ::2]), (x[:0], a[:0])):
        y = view.to("cuda:1")
        assert (y.device, y.shape, y.dtype) == ("cuda:1", right.shape, right.dtype)
        np.testing.assert_array_equal(y.numpy(), right)
        np.testing.assert_array_equal(y.to("cpu"), right)
        assert y.to("cuda:1") is y
        assert y.to("cuda").device == "cuda:0"
    w = SQUARE.to("cuda:1")
    assert w.to("cuda:1") is w
    assert w.to("cuda:0").device == w.to("cuda").device == "cuda:0"
    assert pickle.loads(pickle.dumps(w)).device == "cuda:0"  # wherever it is read, it fits
    target = ns.to_device(np.zeros((4, 6), np.float32), "cuda:1")
    device.refill(target, x)
    np.testing.assert_array_equal(target.numpy(), a)
    copy = device.copy_of(target)
    assert copy.device == "cuda:1"
    np.testing.assert_array_equal(copy.numpy(), a)
    assert "cuda:1" in repr(copy)


def test_what_is_made_within_is_on_that_gpu():
    with ns.device(1) as stream:
        assert stream.device == ns.device().device == ns.stream().device == 1
        made = [ns.to_device(X), ops.zeros((2,), "float32", "cuda"), SQUARE.to("cuda").values]
        with ns.device("cuda:0"):
            made.append(ns.to_device(X, "cuda:1"))
            assert ns.to_device(X).device == "cuda:0"
        side = ns.stream()
    with side:
        made.append(ns.to_device(X))
        assert ns.matmul(ns.to_device(X, "cuda:0"), SQUARE.to("cuda:0")).device == "cuda:0"
    made.append(ops.dropout_mask((2, 3), 0.5, 1, 2, "float32", "cuda:1"))
    assert {a.device for a in made} == {"cuda:1"}
    assert ns.to_device(X).device == "cuda:0"


def test_each_gpu_has_pools_of_its_own():
    with ns.device(1):
        one = device.current_stream()
    assert one.shelves is not streams.DEFAULT.shelves
    assert not one.is_same(streams.DEFAULT)
    assert one.is_same(ns.device(1))


@pytest.mark.parametrize(
    "where", [2, "cuda:2", "cuda:x", "cuda:-1", "gpu", "cuda1", None, 1.5, True]
)
def test_what_is_no_gpu_is_refused(where):
    with pytest.raises((TypeError, ValueError), match=r'takes .*"cuda:'):
        ns.device("" if where is None else where)
    for take in (SQUARE.to, ns.to_device(X).to, Model().to, lambda p: ops.zeros(3, "float32", p)):
        with pytest.raises(ValueError, match=r'place takes "c.*, got'):
            take(where if isinstance(where, str) else str(where))


def test_the_cpu_is_no_gpu():
    with pytest.raises(ValueError, match="of takes a GPU, got 'cpu'"):
        ns.device("cpu")
    with pytest.raises(ValueError, match='place takes "cuda"'):
        ns.to_device(X, "cpu")


def test_a_thread_begins_on_the_default_gpu():
    seen = []

    def work():
        seen.append(ns.to_device(X).device)
        ns.device(1).use()
        seen.append(ns.to_device(X).device)

    with ns.device(1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == ["cuda:0", "cuda:1"]


@pytest.mark.skipif(not device.SIMULATED, reason="a GPU was used before")
def test_the_first_use_is_for_all_threads(monkeypatch):
    monkeypatch.setattr(streams, "_met", set())
    monkeypatch.setattr(runtime, "several_devices", False)
    monkeypatch.setattr(streams.DEFAULT, "_device", None)
    monkeypatch.setattr(streams, "_current", streams._current)
    seen, before = [], device.current_stream()
    try:
        ns.device(1).use()
        thread = threading.Thread(target=lambda: seen.append(ns.to_device(X).device))
        thread.start()
        thread.join()
        assert seen == ["cuda:1"]
        assert ns.to_device(X).device == "cuda:1"
        assert not runtime.several_devices  # nothing has to be asked
    finally:
        streams._current.set(before)


def test_a_kernel_refuses_arrays_of_another_gpu():
    x = ns.to_device(X, "cuda:1")
    with pytest.raises(
        ValueError, match="a kernel on cuda:0 takes arrays there, got one on cuda:1"
    ):
        launch.launch(None, 1, 1, (x,))


@pytest.mark.skipif(not device.SIMULATED, reason="its streams are made up")
def test_work_goes_to_the_stream_of_a_library_on_any_gpu(monkeypatch):
    """From a default stream; from one that was named, what is there waits."""
    theirs, used = streams.Stream(0x500, device=1), []
    way = SimpleNamespace(
        stream_of=lambda x: theirs if isinstance(x, Theirs) else None,
        read=lambda x: None,
        empty_like=lambda x, shape: None,
    )
    monkeypatch.setattr(interop, "SHORT_WAYS", (way,))
    allocate = memory.allocate
    spy = lambda n: used.append(device.current_stream()) or allocate(n)  # noqa: E731
    monkeypatch.setattr(memory, "allocate", spy)
    x, w = Theirs(ns.to_device(X, "cuda:1")), SQUARE.to("cuda:1")
    for where in (streams.DEFAULT, ns.device(1)):
        with where:
            ns.matmul(x, w)
            assert used[-1] is theirs
    named = streams.Stream(0x600, device=1)
    with named:
        ns.matmul(x, w)
    assert used[-1] is named


def test_a_weight_is_tuned_on_its_own_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(tuned, "remember", lambda fastest: seen.append(runtime.current_id()))
    monkeypatch.setattr(choice, "with_tiles", lambda *case: ["k1_naive"])
    module = sys.modules["numbsparse.tune"]
    monkeypatch.setattr(module, "_seconds", lambda call: float(call() is None))
    ns.tune(SQUARE.to("cuda:1"), batch=1)
    assert seen == [1]
