"""numbsparse.jax on a GPU: calls that are made up here as XLA makes them."""

import ctypes
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: see CONTRIBUTING.md")

import jax.numpy as jnp  # noqa: E402

import numbsparse as ns  # noqa: E402
from numbsparse import device  # noqa: E402
from numbsparse.device import empty, memory, runtime, streams  # noqa: E402
from numbsparse.jax import ffi, products  # noqa: E402
from numbsparse.kernels import elementwise  # noqa: E402
from numbsparse.simulator import launch as simulator  # noqa: E402

LAYOUT = ns.Layout(ns.patterns.random(3, 4, 0.4, seed=0))  # of blocks of 8
B, STREAM = 8, 0x700
CODES = {dtype: code for code, dtype in ffi.DTYPES.items()}

simulated = pytest.mark.skipif(not device.SIMULATED, reason="memory of the GPU is not of the host")


# Structures of xla/ffi/api/c_api.h


class Buffer(ctypes.Structure):
    _fields_ = (
        *ffi.HEAD,
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class Buffers(ctypes.Structure):
    _fields_ = (
        *ffi.HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("items", ctypes.POINTER(ctypes.POINTER(Buffer))),
    )


class Word(ctypes.Structure):  # not ended by a zero byte
    _fields_ = ("start", ctypes.c_void_p), ("size", ctypes.c_size_t)


class Attributes(ctypes.Structure):  # all of ours are words
    _fields_ = (
        *ffi.HEAD,
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(Word))),
        ("items", ctypes.POINTER(ctypes.POINTER(Word))),
    )


class CallFrame(ctypes.Structure):
    _fields_ = (
        *ffi.HEAD,
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("operands", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    )


class Version(ctypes.Structure):
    _fields_ = (*ffi.HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int))


class Api(ctypes.Structure):
    _fields_ = (
        *ffi.HEAD,
        ("version", Version),
        ("internal", ctypes.c_void_p),
        ("error_create", ffi.ErrorCreate),
        ("error_message", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", ffi.StreamGetter),
    )


class Metadata(ctypes.Structure):  # filled by the handler
    _fields_ = ("struct_size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32)


class Extension(ctypes.Structure):  # the one for metadata, which others begin like
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    )


class Caller:
    """Calls a handler as XLA does, with arrays of the host for memory of a GPU."""

    def __init__(self, stream=STREAM, any_shape=False):
        self.errors, self.stream, self.any_shape = [], stream, any_shape
        self.api = Api(ctypes.sizeof(Api), None, Version(0, None, 0, 7))
        self.api.error_create = ffi.ErrorCreate(self.error_create)
        self.api.stream_get = ffi.StreamGetter(self.stream_get)
        self.alive = []

    def error_create(self, how):
        self.errors.append(how.contents.message.decode())
        return len(self.errors)

    def stream_get(self, asked):
        assert asked.contents.context == 0xC0
        asked.contents.stream = self.stream
        return 0 if self.stream is not None else 1

    def kept(self, thing):
        self.alive.append(thing)
        return thing

    def buffers(self, arrays):
        found = []
        for a in arrays:
            dims = (ctypes.c_int64 * a.ndim)(*a.shape)
            of = (CODES[a.dtype], a.ctypes.data if a.size else None, a.ndim, dims)
            found.append(ctypes.pointer(self.kept(Buffer(0, None, *of))))
        items = self.kept((ctypes.POINTER(Buffer) * len(found))(*found))
        return Buffers(0, None, len(found), None, items)

    def word(self, text):
        start = self.kept(ctypes.create_string_buffer(text.encode()))
        return ctypes.pointer(self.kept(Word(ctypes.addressof(start), len(text))))

    def attributes(self, words):
        n, pointers = len(words), ctypes.POINTER(Word)
        types = self.kept((ctypes.c_int * n)(*[4] * n))
        names = self.kept((pointers * n)(*map(self.word, words)))
        items = self.kept((pointers * n)(*map(self.word, words.values())))
        return Attributes(0, None, n, types, names, items)

    def __call__(self, name, operands, result, **words):
        frame = CallFrame(0, None, ctypes.addressof(self.api), 0xC0, 3)
        frame.operands, frame.results = self.buffers(operands), self.buffers([result])
        forms = " ".join(f"{a.dtype}{a.shape}" for a in (*operands, result))
        forms = ffi.ANY_SHAPE if self.any_shape else forms
        frame.attributes = self.attributes({"said": f"{' '.join(words.values())} {forms}"})
        return ffi._handlers[f"numbsparse_{name}", "CUDA"](ctypes.byref(frame))


def drawn(*shape, dtype="float32", seed=0):
    host = np.random.default_rng(seed).standard_normal(shape)
    return host.astype(jnp.dtype(dtype))


def cases(rows, features, outputs, dtype):
    """The three products: (name, operands, a result's like, exact result, bound of its error)."""
    x, y = drawn(rows, features, dtype=dtype), drawn(rows, outputs, dtype=dtype, seed=1)
    w = drawn(LAYOUT.n_blocks, B, B, dtype=dtype, seed=2)
    rows_of_x, rows_of_y = x.astype(np.float64), y.astype(np.float64)
    whole = ns.BlockSparse(w.astype(np.float64), LAYOUT, shape=(features, outputs)).toarray()

    def blocks(dense):
        return ns.BlockSparse.from_dense(dense, LAYOUT, block_size=B).data

    def sums(a, b, of=lambda dense: dense):
        exact, size = of(a @ b), of(abs(a) @ abs(b))
        eps = 2.0**-24 if dtype == "float32" else float(jnp.finfo(dtype).eps)
        return exact, 2.0**-23 * (a.shape[1] + 8) * size + eps * abs(exact)

    return [
        ("block_sparse_matmul", (x, w), y, *sums(rows_of_x, whole)),
        ("block_sparse_matmul_transposed", (y, w), x, *sums(rows_of_y, whole.T)),
        ("block_sparse_sddmm", (x, y), w, *sums(rows_of_x.T, rows_of_y, blocks)),
    ]


HOW = {"layout": LAYOUT.word, "precision": "highest"}
products._layouts[LAYOUT.word] = LAYOUT  # as if it had been lowered


@simulated
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_call_fills_the_result_on_the_stream_of_xla_and_copies_nothing(rows, dtype, monkeypatch):
    seen, call = [], Caller()
    simulated_run = simulator.run

    def run(*args):
        seen.append(device.current_stream().handle)
        simulated_run(*args)

    monkeypatch.setattr(simulator, "run", run)
    for name, operands, like, exact, bound in cases(rows, 20, 27, dtype):
        for copied in (True, False):  # the layout's index goes to the GPU once
            if not copied:
                monkeypatch.setattr(memory, "copy_in", None)
                monkeypatch.setattr(memory, "copy_out", None)
            out = np.full_like(like, np.nan)
            assert not call(name, operands, out, **HOW), call.errors
            assert (abs(out.astype(np.float64) - exact) <= bound).all()
        monkeypatch.undo()
        monkeypatch.setattr(simulator, "run", run)
    assert set(seen) == {STREAM}
    assert device.current_stream().handle != STREAM


@simulated
@pytest.mark.parametrize("any_shape", [False, True])
def test_a_call_that_comes_again_is_started_on_what_is_there_now(any_shape, monkeypatch):
    """In the same buffers, of one layout, on one stream; any other is worked out."""
    (name, (x, w), y, *_), *_ = cases(2, 24, 32, "float32")
    other = ns.Layout(np.roll(LAYOUT.pattern, 1, 1))
    calls = [Caller(any_shape=any_shape), Caller(STREAM + 16, any_shape)]
    hows = [HOW, HOW | {"layout": other.word}]
    layouts, seen, matmul = [LAYOUT, other], [], products.ops.matmul
    monkeypatch.setitem(products._layouts, other.word, other)
    monkeypatch.setattr(
        products.ops, "matmul", lambda *of, **how: seen.append(of) or matmul(*of, **how)
    )
    monkeypatch.setattr(ffi, "_handlers", {})
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *of, **how: None)
    ffi.register(f"numbsparse_{name}", products._matmul)  # anew: nothing is known
    rng = np.random.default_rng(3)
    for stream, which, n in 3 * [(0, 0, 2), (1, 0, 2), (0, 1, 2), (0, 0, 1)]:
        call = calls[stream]
        x[:], w[:], y[:] = rng.standard_normal(x.shape), rng.standard_normal(w.shape), np.nan
        assert not call(name, (x[:n], w), y[:n], **hows[which]), call.errors
        dense = ns.BlockSparse(w.astype(np.float64), layouts[which]).toarray()
        np.testing.assert_allclose(y[:n], x[:n].astype(np.float64) @ dense, atol=1e-4)
        assert np.isnan(y[n:]).all()
    assert len(seen) == 2 * 4  # the second time it is recorded


@simulated
def test_memory_of_a_call_in_a_command_buffer_is_its_own_and_stays(monkeypatch):
    """XLA launches its graph again without a call, and tells of no end."""
    monkeypatch.setattr(streams.Stream, "is_captured", property(lambda s: s.handle == STREAM))
    monkeypatch.setattr(streams, "relaxed", nullcontext)
    monkeypatch.setattr(streams, "_apart", streams.default)
    monkeypatch.setattr(ffi, "_arenas", {})
    monkeypatch.setattr(ffi, "_handlers", {})
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *of, **how: None)
    taken, n_calls = [], 0

    def compute(x, y, *words):
        nonlocal n_calls
        beside = empty(x.shape, x.dtype)
        elementwise.copy(beside, x)
        elementwise.copy(y, beside)
        taken.append(beside.address)
        n_calls += 1

    ffi.register("numbsparse_copied", compute)
    x, others = drawn(3, 4), np.empty((2, 3, 4), np.float32)
    for stream in (STREAM, STREAM + 16):
        for y in 4 * [others[0], others[1]]:
            x[:], y[:] = drawn(3, 4, seed=len(taken)), np.nan
            assert not Caller(stream)("copied", (x,), y, **HOW)
            np.testing.assert_array_equal(y, x)
    assert len(ffi._arenas) == 2
    assert n_calls == 2 * 2 * 2, "twice for each set of buffers, on each stream"


@simulated
def test_what_goes_wrong_in_a_call_is_the_error_of_xla(monkeypatch):
    (_, operands, like, *_), *_ = cases(3, 20, 27, "float32")
    call = Caller(stream=None)
    assert call("block_sparse_matmul", operands, like, **HOW) == 1
    assert call.errors == ["RuntimeError: XLA names no stream for this call"]
    call = Caller()
    assert call("block_sparse_matmul", operands, like, **HOW | {"precision": "low"}) == 1
    assert "precision takes one of" in call.errors[0]
    assert device.current_stream().handle != STREAM


@pytest.fixture
def two_gpus(monkeypatch):
    """STREAM + 32 is one of the second; the driver takes memory of XLA's for the first one's."""
    if not device.SIMULATED:
        pytest.skip("its second GPU is made up")
    for module, name, value in (
        (runtime, "simulated_devices", 2), (runtime, "several_devices", True),
        (streams, "several", True), (streams, "_met", {0, 1}), (streams, "_defaults", {}),
        (streams.Stream, "_asked_device", lambda self: int(self.handle == STREAM + 32)),
        (runtime, "device_at_address", lambda address: 0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    streams._known.cache_clear()
    yield
    streams._known.cache_clear()


def test_handlers_follow_the_stream_of_xla_to_its_gpu(two_gpus, monkeypatch):
    """Whichever one is current in XLA's thread."""
    seen, made_current = [], []

    @contextmanager
    def context(stream):
        made_current.append(stream.device)
        yield
        made_current.pop()

    def compute(*arrays):
        seen.append((device.current_stream().device, *made_current))

    monkeypatch.setattr(streams.Stream, "context", context)
    monkeypatch.setattr(ffi, "_call", lambda compute, *of: compute())
    for number in (STREAM + 32, STREAM + 16):
        monkeypatch.setattr(ffi, "_stream", lambda *of, number=number: number)
        ffi._on_gpu(compute, {}, 0, 0, (), b"")
    assert seen == [(1, 1), (0, 0)]
    assert device.current_stream().device == 0


def test_work_for_a_second_gpu_stays_on_the_stream_of_xla(two_gpus, monkeypatch):
    """It went to a stream of the first one's, which may not have had its operands yet."""
    seen, run = [], simulator.run
    monkeypatch.setattr(
        simulator, "run", lambda *of: seen.append(device.current_stream()) or run(*of)
    )
    for stream, gpu in ((STREAM + 32, 1), (STREAM + 16, 0)):
        call = Caller(stream)
        for name, operands, like, exact, bound in cases(3, 20, 27, "float32"):
            out = np.full_like(like, np.nan)
            assert not call(name, operands, out, **HOW), call.errors
            assert (abs(out.astype(np.float64) - exact) <= bound).all()
        assert {(each.handle, each.device) for each in seen} == {(stream, gpu)}
        seen.clear()


def test_errors_are_told_at_once_where_other_gpus_wait(two_gpus, monkeypatch, capsys):
    (_, operands, like, *_), *_ = cases(3, 20, 27, "float32")
    assert Caller()("block_sparse_matmul", operands, like, **HOW | {"precision": "low"}) == 1
    assert "numbsparse.jax: ValueError: precision takes one of" in capsys.readouterr().err


def test_where_jax_is_the_gpu_is_the_first(monkeypatch):
    """JAX leaves the one current that it began last."""
    cuda_core = pytest.importorskip("cuda.core")
    monkeypatch.setattr(runtime, "SIMULATED", False)
    monkeypatch.setattr(cuda_core, "Device", lambda: SimpleNamespace(device_id=1))
    assert streams.Stream(0)._asked_device() == 0
    monkeypatch.delitem(sys.modules, "jax")
    assert streams.Stream(0)._asked_device() == 1


def test_handlers_are_fit_for_command_buffers():
    metadata = Metadata(ctypes.sizeof(Metadata), Version(ctypes.sizeof(Version)), 0)
    extension = Extension(0, ffi.METADATA, None, ctypes.pointer(metadata))
    caller = Caller()
    for api, minor in ((None, 1), (ctypes.addressof(caller.api), 7)):
        frame = CallFrame(0, ctypes.addressof(extension), api)
        for handler in ffi._handlers.values():
            metadata.version.major, metadata.traits = 7, 0
            assert not handler(ctypes.byref(frame))
            version = metadata.version.major, metadata.version.minor
            assert (version, metadata.traits) == ((0, minor), ffi.CAPTURABLE)
            assert metadata.version.struct_size == ctypes.sizeof(Version)
