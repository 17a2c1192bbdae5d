"""Shortcuts through Numba's compiler: what they give is what Numba gives, and they end."""

import os
import subprocess
import sys
from contextlib import suppress

import numba
import numpy as np
import pytest
from numba import extending, njit, types
from numba.core import postproc
from numba.core.types.functions import BaseFunction
from numba.core.typing import templates

from numbsparse.device import shortcuts

OWNERS = (
    (postproc.PostProcessor, "run"),
    (BaseFunction, "get_call_type"),
)


def in_place():
    return [vars(owner)[name] for owner, name in OWNERS]


def test_they_last_as_long_as_the_outermost_context():
    own = in_place()
    with suppress(KeyError), shortcuts.taken():
        ours = in_place()
        assert not any(a is b for a, b in zip(ours, own, strict=True))
        with shortcuts.taken():
            pass
        assert in_place() == ours
        {}["error"]
    assert in_place() == own


@pytest.mark.parametrize("version", ["0.60.0", "0.69.0rc1", "1.61.2"])
def test_a_numba_that_nobody_read_compiles_as_usual(version, monkeypatch):
    of_this = shortcuts._shortcuts.__wrapped__
    assert len(of_this(False)) == len(OWNERS)
    monkeypatch.setattr(numba, "__version__", version)
    assert of_this(False) == []


def test_beside_the_simulator_too_they_begin_and_end():
    """It has no compiler of numba-cuda's, whose other modules something else may have loaded."""
    pytest.importorskip("numba.cuda.core.postproc")
    own = in_place()
    with shortcuts.taken():
        assert not any(a is b for a, b in zip(in_place(), own, strict=True))
    assert in_place() == own


def products():
    """Loops, tuples, slices, branches, and calls of a function by two types."""

    @njit
    def total(a, by):
        found = a[0] * by
        for i in range(1, a.size):
            found += a[i] * by if a[i] > 0 else a[i] // 3
        return found

    @njit
    def sums(a, b):
        both = (total(a, np.float32(2)), total(b, np.int64(3)), total(a[1:], 2.5))
        return both[0] + both[1] - both[2]

    return sums


def test_code_is_what_numba_compiles(rng):
    a, b = rng.standard_normal(50).astype(np.float32), rng.integers(-9, 9, 50)
    first, second, without = products(), products(), products()
    with shortcuts.taken():
        found = first(a, b), second(a, b)
    assert found == (without(a, b),) * 2
    codes = [set(map(simple, f.inspect_asm().values())) for f in (first, second, without)]
    assert codes[0] == codes[1] == codes[2]


def simple(code):
    """Its instructions: names and numbers of functions differ from one to the next."""
    lines = (line.split("#")[0].split() for line in code.splitlines())
    return tuple(line[0] for line in lines if line and line[0][0] != "." and line[0][-1] != ":")


def test_generators_are_compiled_and_what_is_alive_can_be_asked_for():
    with shortcuts.taken():

        @njit
        def counted(n):
            last = 0
            for i in range(n):
                yield i + last
                last = i

        assert list(counted(4)) == [0, 1, 3, 5]

    lazy = shortcuts._Lazy(lambda: {"block": {"x"}})
    assert "other" not in lazy
    assert lazy["block"] == {"x"}


def nine(a):
    raise NotImplementedError


def test_what_is_registered_while_they_last_is_found():
    """Of both kinds: a function in Python, and one that gives instructions itself."""
    with shortcuts.taken():

        @njit
        def early(a):
            return a + 1

        assert early(1) == 2

        @extending.overload(nine)
        def of_nine(a):
            return lambda a: 9

        class OneArgument(templates.AbstractTemplate):
            def generic(self, args, kws):
                return templates.signature(types.int64, types.int64)

        ten = extending.intrinsic(lambda context, a: (types.int64(types.int64), emit))
        templates.infer_global(eleven)(type("Eleven", (OneArgument,), {"key": eleven}))
        extending.lower_builtin(eleven, types.int64)(emit)

        @njit
        def late(a):
            return nine(a), ten(a), eleven(a)

        assert late(1) == (9, 7, 7)


def eleven(a):
    raise NotImplementedError


def emit(context, builder, signature, args):
    return context.get_constant(types.int64, 7)


def summed(a):
    raise NotImplementedError


@extending.overload(summed)
def of_summed(a):
    def in_order(a):
        total = 0.0
        for x in a:
            total += x
        return total

    return in_order


@pytest.mark.parametrize("first", [True, False])
def test_each_function_keeps_its_own_options(first):
    """Also in the functions of others that it calls, such as whether sums may be reordered."""
    signature = types.float64(types.float64[::1])
    with shortcuts.taken():
        for fast in (first, not first):
            compiled = njit(signature, fastmath=fast)(lambda a: summed(a))
            assert ("fadd fast" in compiled.inspect_llvm(signature.args)) == fast


class Device:
    """As a device function, which is told by what it closes over."""

    def __init__(self, py_func, **options):
        self.py_func, self.targetoptions = py_func, {"fastmath": False} | options


def closing_over(*values, default=0, **options):
    def function(x=default):
        return values, x

    return Device(function, **options)


def closing_over_too(*values, default=0):
    def other_function(x=default):
        return x, values

    return Device(other_function)


def test_functions_are_the_same_if_all_they_close_over_is():
    first = {}

    def same(one, other):
        of_one = shortcuts._known_by(one, first)
        first.setdefault(of_one, one)
        return of_one == shortcuts._known_by(other, first)

    inner = object()
    alike = lambda: closing_over(1, (2.0, "a"), None, inner)  # noqa: E731
    assert same(alike(), alike())
    assert same(closing_over(alike()), closing_over(alike()))
    for other in (True, 1.0, 2, "1", (1,), object()):
        assert not same(closing_over(1), closing_over(other)), other
    assert not same(closing_over((1, 2)), closing_over([1, 2]))
    assert not same(closing_over(1), closing_over(1, default=1))
    assert not same(closing_over(1), closing_over(1, fastmath=True))
    assert not same(closing_over(closing_over(1)), closing_over(closing_over(2)))
    assert not same(closing_over(1), closing_over_too(1))


COMPILED = """
from contextlib import nullcontext
from numba import cuda, types
from numba.cuda import compiler as numbas
from numbsparse.device import compiler, runtime, shortcuts, stand_in

stand_in.install()
compiler.load_numba()
functions, own = [], numbas.compile_extra
numbas.compile_extra = lambda *a, **kw: functions.append(a) or own(*a, **kw)

module = "numbsparse.kernels.made_here"

def adding(by):
    @cuda.jit(device=True)
    def add(x):
        return x + by
    add.py_func.__module__ = module
    return add

def kernel_of(*device_functions):
    one, other = device_functions
    @cuda.jit
    def kernel(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] = one(x[i]) * other(x[i])
    return kernel

def code(*by):
    kernel = kernel_of(*map(adding, by))
    found = compiler.linked(kernel, compiler.lto_ir(kernel, (types.float32[::1],))).code
    return found[found.index(b"ELF"):]

def text(cubin):
    from numbsparse.machine_code.cubin import description
    return description(b"\\x7f" + cubin)["hash"]

for quick in (True, False):
    if not quick:
        shortcuts.taken = nullcontext
    found = []
    for by in ((1, 1), (1, 2), (2, 1), (1.0, 2), (1, 1)):
        module = module if len(found) < 4 else "of_the_user"
        functions.clear()
        found.append((text(code(*by)), len(functions)))
    print(found)
"""


def test_gpu_code_is_what_numba_compiles_of_fewer_functions(compilers):
    ended = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    quick, slow = map(eval, ended.stdout.splitlines())
    assert [hash_ for hash_, _ in quick] == [hash_ for hash_, _ in slow]
    assert len({hash_ for hash_, _ in quick[:2]}) == 2
    assert [n for _, n in slow] == [3, 3, 3, 3, 3]
    assert [n for _, n in quick] == [2, 2, 1, 2, 3]  # the kernel, and functions not seen before
