"""Arrays of libraries that are made up: what is refused, and in whose arrays results come out."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device
from numbsparse.device import streams

pytestmark = pytest.mark.skipif(not device.SIMULATED, reason="on a GPU: test_interop.py")

X = np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
W = ns.BlockSparse(
    np.random.default_rng(1).standard_normal((2, 4, 4), dtype=np.float32), [[1], [1]]
)
RESULT = X @ W.toarray()


class Theirs:
    def __init__(self, host, **attributes):
        self.array = ns.to_device(host)
        self.__cuda_array_interface__ = self.array.__cuda_array_interface__
        self.__dict__.update(attributes)

    def detach(self):
        return self


@pytest.mark.parametrize("argument", ["x", "out", "a", "b", "data"])
def test_a_tensor_that_requires_grad_is_refused_where_torch_records(argument, monkeypatch):
    torch = SimpleNamespace(
        is_grad_enabled=lambda: True, Tensor=None, nn=SimpleNamespace(Parameter=0)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    y = np.full((3, 4), np.nan, np.float32)
    watched = {name: Theirs(host, requires_grad=True) for name, host in (
        ("x", X), ("out", y), ("a", X.T.copy()), ("b", RESULT), ("data", W.data)
    )}  # fmt: skip
    w = W.to("cuda")
    calls = {
        "x": lambda x: ns.matmul(x, w),
        "out": lambda out: ns.matmul(ns.to_device(X), w, out=out),
        "a": lambda a: ns.sddmm(a, ns.to_device(RESULT), w),
        "b": lambda b: ns.sddmm(ns.to_device(X).T, b, w),
        "data": lambda data: ns.BlockSparse(data, W.layout),
    }
    call, array = calls[argument], watched[argument]
    with pytest.raises(ValueError, match=rf"{argument} requires grad.*use numbsparse\.torch"):
        call(array)
    torch.is_grad_enabled = lambda: False  # as within torch.no_grad()
    call(array)
    if argument == "out":
        np.testing.assert_allclose(array.array.numpy(), RESULT, atol=1e-5)


def test_arrays_of_jax_come_back_as_copies_that_are_done(monkeypatch):
    done, given_back = [], []

    class Array(Theirs):
        """One of JAX's, which say that they are of jaxlib."""

    class Lent:
        def __init__(self, array):
            assert waits, "JAX may read what is not written yet"
            self.array = array

        def delete(self):
            assert done, "JAX may still read it"
            given_back.append(self.array)

    Array.__module__ = "jaxlib._jax"
    jax = SimpleNamespace(
        dlpack=SimpleNamespace(from_dlpack=Lent),
        numpy=SimpleNamespace(array=lambda lent, copy: Array(lent.array.numpy()) if copy else None),
        block_until_ready=lambda x: done.append(x) or x,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    waits = []
    monkeypatch.setattr(streams, "finish", lambda: waits.append(True))
    w = W.to("cuda")
    for product in (lambda: ns.matmul(Array(X), w), lambda: w.T @ Array(X.T.copy())):
        y = product()
        assert type(y) is Array
        assert done.pop() is y
        assert given_back.pop() is not None
        assert [waits.pop(), waits.pop()] == [True, True]  # before JAX reads, and at the end
    np.testing.assert_allclose(y.array.numpy(), RESULT.T, atol=1e-5)
    ns.sddmm(Array(X.T.copy()), Array(RESULT), [[1], [1]])
    assert waits == [True], "XLA may take back memory that is still read"


@pytest.mark.parametrize("library", ["jaxlib._jax", "theirs"])
def test_a_result_is_not_written_to_an_array_that_is_read_only(library):
    array = ns.to_device(np.zeros_like(RESULT))
    address = array.__cuda_array_interface__["data"][0]
    lent = array.__cuda_array_interface__ | {"data": (address, library == "theirs")}
    kind = type("Array", (), {"__module__": library, "__cuda_array_interface__": lent})
    with pytest.raises(ValueError, match=r"out takes a writeable array, got a read-only .*Array"):
        ns.matmul(ns.to_device(X), W.to("cuda"), out=kind())
    np.testing.assert_array_equal(array.numpy(), 0)


@pytest.mark.parametrize("what", ["address", "strides"])
def test_values_between_the_multiples_of_their_size_are_refused(what):
    lent = Theirs(X)
    address, strides = lent.__cuda_array_interface__["data"][0], (33, 4)
    odd = {"data": (address + 2, False)} if what == "address" else {"strides": strides}
    lent.__cuda_array_interface__ = lent.__cuda_array_interface__ | odd
    with pytest.raises(ValueError, match="x takes values at multiples of their size: pass a copy"):
        ns.matmul(lent, W.to("cuda"))
