"""Lesson 5: a race and its barrier.

You will learn why `cuda.syncthreads()` is where it is. Between two barriers the threads of a
block run in any order. A kernel whose result depends on that order has a race, even if it is right
today: the order is the hardware's, and may change with the card, the load and the day.

Look at the same kernel in two chosen orders: a thread's turn lasts until its next barrier. NaN is
what was read before it was written. A race need not show, so `races` looks at the addresses instead
of the results: who touches what, with no barrier between.

Exercise: write a kernel that adds neighbours, y[t] = tile[t] + tile[t + 1], and then stores y[t] in
tile[t] for a second round. How many barriers does it need? Take one away, and ask `races`.
"""

import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # the order is the simulator's to choose

import numpy as np
from numba import cuda, float32

import numbsparse as ns
from numbsparse.device.launch import launch

N = 8


@cuda.jit
def racing_kernel(x, y):
    """y is x from its end to its start: thread t reads what thread N - 1 - t writes."""
    tile = cuda.shared.array(N, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    y[t] = tile[N - 1 - t]


@cuda.jit
def waiting_kernel(x, y):
    tile = cuda.shared.array(N, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()  # all have written
    y[t] = tile[N - 1 - t]


x = ns.to_device(np.arange(N, dtype=np.float32))
y = ns.to_device(np.zeros(N, np.float32))


def wrong_in(kernel, order):
    """How many values come out wrong where the threads take turns in this order."""
    with ns.testing.in_turns(order):
        launch(kernel, 1, N, x, y)
    wrong = int((y.numpy() != x.numpy()[::-1]).sum())
    print(f"  threads in {order:7} order: {y.numpy()}, {wrong} wrong")
    return wrong


def races_of(kernel):
    found = ns.testing.races(lambda: launch(kernel, 1, N, x, y))
    print("  " + ("\n  ".join(map(str, found)) or "no race"))
    return found


print("without a barrier")
assert wrong_in(racing_kernel, "rising") == wrong_in(racing_kernel, "falling") == N // 2
assert len(races_of(racing_kernel)) == 1
print("with a barrier")
assert wrong_in(waiting_kernel, "rising") == wrong_in(waiting_kernel, "falling") == 0
assert races_of(waiting_kernel) == []
