"""Mailboxes of some GPUs, all in this process: what one sends is what the others receive."""

import ctypes

import numpy as np
import pytest
from conftest import HALVES

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import exchange
from numbsparse.kernels.pack import pack

pytestmark = pytest.mark.skipif(not device.SIMULATED, reason="on GPUs they are two processes'")
WORDS = 24  # of a slot


def all_ends(size):
    boxes, flags, counts = (
        [ns.to_device(np.zeros(shape, dtype)) for _ in range(size)]
        for shape, dtype in (((2, size, WORDS), np.uint32), (size, np.int32), (1, np.int32))
    )
    return [
        exchange.Ends(i, size, boxes[i], boxes, flags[i], flags, counts[i]) for i in range(size)
    ]


@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), *((3, half) for half in HALVES)])
def test_parts_are_gathered_and_terms_summed(size, dtype, rng):
    """Several exchanges one after another, of several sizes, in each the slots in turn."""
    ends, dtype = all_ends(size), as_dtype(dtype)
    for rows, width in ((3, 8), (1, 4), (2, 6), (3, 8)):
        parts = [rng.integers(-9, 9, (rows, width)).astype(dtype) for _ in ends]
        terms = [rng.integers(-9, 9, (rows, size * width)).astype(dtype) for _ in ends]
        there = [ns.to_device(a) for a in parts]
        for own, end in zip(there, ends, strict=True):
            exchange.send_whole(own, end)
        for own, end in zip(there, ends, strict=True):
            whole = ns.to_device(np.full((rows, size * width), np.nan, dtype))
            exchange.receive_whole(own, whole, end)
            np.testing.assert_array_equal(whole.numpy(), np.concatenate(parts, 1))
        there = [ns.to_device(a) for a in terms]
        for own, end in zip(there, ends, strict=True):
            exchange.send_parts(own, end)
        for rank, (own, end) in enumerate(zip(there, ends, strict=True)):
            part = ns.to_device(np.full((rows, width), np.nan, dtype))
            exchange.receive_sum(own, part, end)
            mine = slice(rank * width, (rank + 1) * width)
            np.testing.assert_array_equal(part.numpy(), sum(terms)[:, mine])
    assert [end.exchanges.numpy()[0] for end in ends] == [8] * size


@pytest.mark.parametrize("receive", ["whole", "sum"])
def test_who_comes_first_waits_for_all_others(receive, monkeypatch):
    """A message arrives when its flag was read twice, and no sooner."""
    ends, load, width = all_ends(3), exchange.load_acquire_system, 4
    own = ns.to_device(np.full((1, width if receive == "whole" else 3 * width), 1, np.float32))
    (exchange.send_whole if receive == "whole" else exchange.send_parts)(own, ends[0])
    box = memory_of(ends[0].mine, np.float32)
    flags, reads = memory_of(ends[0].my_flags, np.int32), [0] * 3

    def arriving(there, sender):
        before, reads[sender] = load(there, sender), reads[sender] + 1
        if reads[sender] == 2:
            box[1, sender, :width], flags[sender] = 10 * sender, 1
        return before

    monkeypatch.setattr(exchange, "load_acquire_system", arriving)
    got = ns.to_device(np.full((1, 3 * width if receive == "whole" else width), np.nan, np.float32))
    (exchange.receive_whole if receive == "whole" else exchange.receive_sum)(own, got, ends[0])
    right = np.repeat([1, 10, 20], width) if receive == "whole" else np.full(width, 31)
    np.testing.assert_array_equal(got.numpy()[0], right)


def memory_of(array, dtype):
    """The simulated memory itself."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.address)
    return np.frombuffer(memory, dtype).reshape(array.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
def test_arrays_are_packed(dtype, rng):
    """More than one launch takes, odd sizes and none among them; nothing between is written."""
    dtype, starts, size = as_dtype(dtype), [], 0
    arrays = [rng.integers(-9, 9, n).astype(dtype) for n in rng.integers(0, 300, 11)]
    exact = np.full(11 * 512, np.nan).astype(dtype)
    for a in arrays:
        starts.append(size)
        exact[size : size + a.size] = a
        size += -(-a.size // 128) * 128
    flat = ns.to_device(np.full(exact.shape, np.nan).astype(dtype))
    pack([ns.to_device(a.reshape(-1, 1)) for a in arrays], flat, starts)
    np.testing.assert_array_equal(flat.numpy().astype(np.float64), exact.astype(np.float64))
