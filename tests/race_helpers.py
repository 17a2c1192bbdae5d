"""Kernels that race, and their twins that do not."""

import re

import numpy as np
from numba import cuda

import numbsparse as ns
from numbsparse.device.launch import launch
from numbsparse.testing import races

N = 128  # values in a tile, four for each of 32 threads


@cuda.jit(device=True)
def nothing():
    pass


@cuda.jit(device=True)
def meet():
    cuda.syncthreads()


def array(n=N):
    return ns.to_device(np.arange(n, dtype=np.float32))


def of(kernel, threads=32):
    return lambda: launch(kernel, 1, threads, array(), array())


def check(racing, said, right):
    """Of the one a race is found, with these words, of the other none."""
    found = [str(race) for race in races(racing)]
    assert any(re.search(said, race) for race in found), found
    assert races(right) == []
