"""Static shared arrays in the simulator: one for each place in the compiled text, as on a GPU."""

import numpy as np
import pytest
from numba import cuda, float32

import numbsparse as ns
from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.testing import races

simulator = pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")

N = 32


@cuda.jit
def one_line_kernel(x, y):
    a, b = cuda.shared.array(N, float32), cuda.shared.array(N, float32)
    t = cuda.threadIdx.x
    a[t], b[t] = x[t], -x[t]
    cuda.syncthreads()
    y[t] = a[N - 1 - t] - 2 * b[N - 1 - t]


@cuda.jit
def loop_kernel(x, y):
    """In each round the arrays are those of the round before: what was stored there is found."""
    t = cuda.threadIdx.x
    total = float32(0)
    for step in range(3):
        a, b = cuda.shared.array(N, float32), cuda.shared.array(N, float32)
        if step == 0:
            a[t], b[t] = x[t], 1
        total += a[t] * b[t]
        b[t] += 1
    y[t] = total


@cuda.jit(device=True)
def reversed_copy(x):
    """x[N - 1 - t], through shared memory."""
    t, tile = cuda.threadIdx.x, cuda.shared.array(N, float32)
    tile[t] = x[t]
    cuda.syncthreads()
    return tile[N - 1 - t]


def turning(kept):
    """A function that puts `kept` into an array of its own, at the place in the text of all."""

    @cuda.jit(device=True)
    def keep(t):
        tile = cuda.shared.array(N, float32)
        if tile[t] != tile[t]:  # as nobody wrote to it before
            tile[t] = kept
        return tile[t]

    return keep


keep_one, keep_two = turning(1), turning(2)


@cuda.jit
def racing_calls_kernel(x, y):
    t = cuda.threadIdx.x
    y[t] = reversed_copy(x) + reversed_copy(y)  # one array for both


@cuda.jit
def ordered_calls_kernel(x, y):
    t = cuda.threadIdx.x
    first = reversed_copy(x)
    cuda.syncthreads()  # all have read it
    y[t] = first + 2 * reversed_copy(x)


@cuda.jit
def other_functions_kernel(x, y):
    t = cuda.threadIdx.x
    y[t] = 100 * keep_one(t) + 10 * keep_two(t) + keep_one(t)


@cuda.jit
def other_types_kernel(x, y):
    """Numba compiles `reversed_copy` once for each type of array: no barrier is needed between."""
    t, line = cuda.threadIdx.x, x[0]
    y[t] = reversed_copy(line) + reversed_copy(y)


def arrays():
    return ns.to_device(np.arange(N, dtype=np.float32)), ns.to_device(np.ones(N, np.float32))


def run(kernel):
    x, y = arrays()
    launch(kernel, 1, N, x, y)
    return y.numpy()


TURNED = np.arange(N)[::-1]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (one_line_kernel, 3 * TURNED),
        (loop_kernel, 6 * TURNED[::-1]),
        (ordered_calls_kernel, 3 * TURNED),
    ],
)
def test_each_place_in_the_text_has_an_array(kernel, expected):
    np.testing.assert_array_equal(run(kernel), expected)
    if device.SIMULATED:
        assert races(lambda: launch(kernel, 1, N, *arrays())) == []


@simulator
def test_functions_of_one_text_have_their_own():
    np.testing.assert_array_equal(run(other_functions_kernel), 121)


@simulator
def test_calls_of_a_function_share_its_array():
    (race,) = races(lambda: launch(racing_calls_kernel, 1, N, *arrays()))
    assert race.space == "shared"
    assert race.written_at.startswith("test_shared_arrays.py:")
    assert not np.array_equal(run(racing_calls_kernel), TURNED + 1)


@simulator
def test_a_function_has_an_array_for_each_type_that_it_takes():
    x, y = ns.to_device(np.zeros((1, N), np.float64)), arrays()[1]
    assert races(lambda: launch(other_types_kernel, 1, N, x, y)) == []
