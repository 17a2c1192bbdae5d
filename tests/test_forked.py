"""Processes forked while other threads compute: what those held is free there."""

import os
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from distributed_helpers import run, values
from distributed_programs import after_a_fork
from mutants_forked import forked

from numbsparse.autograd import Tensor, reducers
from numbsparse.device import shortcuts

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@contextmanager
def held_elsewhere(lock):
    """Within this context another thread holds the lock."""
    holds, leave = threading.Event(), threading.Event()

    def hold():
        with lock:
            holds.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def gradient():
    x = Tensor(np.ones(2), requires_grad=True)
    (x * x).sum().backward()
    return x.grad.numpy().tolist()


def shortcut():
    with shortcuts.taken():
        return [2.0, 2.0]


@pytest.mark.parametrize(
    ("lock", "work"), [(reducers._adding, gradient), (shortcuts._lock, shortcut)]
)
def test_a_forked_process_waits_for_no_thread_of_its_parents(lock, work):
    with held_elsewhere(lock):
        assert list(forked(lambda say: say(work()), 10)) == [[2.0, 2.0]]


def test_a_forked_process_does_not_leave_the_group_of_its_parent():
    assert values(run(after_a_fork)) == [2.0, 2.0]
