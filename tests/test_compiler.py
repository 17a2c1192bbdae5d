"""A kernel compiled in one pass is the one that Numba makes in two; Numba takes what is left."""

import struct
from contextlib import nullcontext

import numpy as np
import pytest
from numba import cuda, float32, types

import numbsparse as ns
from numbsparse.device import compiler
from numbsparse.device.launch import launch

on_a_gpu = pytest.mark.gpu(reason="nothing is compiled without a GPU")
PLAIN = {"debug": 0, "opt": True, "link": (), "fastmath": False, "lto": True, "extensions": []}


@pytest.mark.parametrize("options", [{}, {"fastmath": True, "max_registers": 64, "opt": False}])
def test_plain_kernels(options):
    assert compiler._is_plain(PLAIN | options)


@pytest.mark.parametrize(
    "options", [{"lto": False}, {"debug": True}, {"link": ["a.cu"]}, {"a_new_option": None}]
)
def test_kernels_left_to_numba(options):
    assert not compiler._is_plain(PLAIN | options)


def summing(**options):
    """y[i] = the sum of a block's x."""

    @cuda.jit(**options)
    def kernel(x, y):
        parts = cuda.shared.array(64, float32)
        i = cuda.threadIdx.x
        parts[i] = x[i] / float32(3)
        cuda.syncthreads()
        total = float32(0)
        for k in range(cuda.blockDim.x):
            total += parts[k]
        y[i] = total

    return kernel


def meeting():
    """Of all blocks, each reads what another one wrote; that takes the runtime's library."""

    @cuda.jit
    def kernel(x, y):
        y[cuda.grid(1)] = x[cuda.grid(1)]
        cuda.cg.this_grid().sync()

    return kernel


ARRAYS = types.Array(types.float32, 1, "C"), types.Array(types.float32, 1, "C")


@on_a_gpu
@pytest.mark.parametrize("options", [{}, {"max_registers": 16}, {"fastmath": True}], ids=str)
def test_one_pass_makes_the_same_machine_code(options):
    once = compiler._optimized_once(summing(**options), ARRAYS)
    twice = compiler._by_numba(summing(**options), ARRAYS)
    assert instructions(once.code) == instructions(twice.code) != b""
    assert once.name.encode() in once.code


def instructions(cubin):
    """The sections of code of an ELF file."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, start + size * i) for i in range(count)]
    letters = sections[names][4]
    return b"".join(
        cubin[offset : offset + nbytes]
        for name, _, _, _, offset, nbytes in sections
        if cubin[letters + name :].startswith(b".text.")
    )


@on_a_gpu
@pytest.mark.parametrize(
    "options", [{}, {"debug": True, "opt": False}, {"lineinfo": True}], ids=str
)
def test_what_they_compute(options):
    x, y = ns.to_device(np.arange(64, dtype=np.float32)), ns.to_device(np.zeros(64, np.float32))
    launch(summing(**options), 1, 64, x, y)
    np.testing.assert_allclose(y.numpy(), 672, rtol=1e-5)


@on_a_gpu
def test_a_kernel_that_takes_another_library_is_built_by_numba():
    assert compiler._optimized_once(meeting(), ARRAYS) is None
    assert compiler.build(meeting(), ARRAYS).kernel is not None


@on_a_gpu
def test_errors_are_numbas():
    @cuda.jit
    def kernel(x, y):
        y[0] = x.no_such_attribute

    with pytest.raises(Exception, match="no_such_attribute"):
        compiler.build(kernel, ARRAYS)


@pytest.mark.parametrize("fails", [False, True])
def test_numba_finds_a_name_that_numpy_no_longer_has(fails, monkeypatch):
    seen = []

    def load(name):
        seen.append((name, vars(np)["row_stack"]))
        if fails:
            raise ImportError("broken")

    monkeypatch.delattr(np, "row_stack", raising=False)
    monkeypatch.setattr(compiler, "import_module", load)
    with pytest.raises(ImportError) if fails else nullcontext():
        compiler.load_numba.__wrapped__()
    assert seen == [("numba.cuda.np.arrayobj", np.vstack)]
    assert "row_stack" not in vars(np)


def test_numpys_own_name_stays(monkeypatch):
    own = object()
    monkeypatch.setitem(vars(np), "row_stack", own)
    monkeypatch.setattr(compiler, "import_module", lambda name: None)
    compiler.load_numba.__wrapped__()
    assert vars(np)["row_stack"] is own
