"""Ranks for tests: processes forked from one that has loaded the library, so that each starts fast.

A rank runs a function of this module or of a test's; what it returns, or how it ends, comes back.
"""

import multiprocessing
import os
import socket
import time
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

LIMIT = 240  # seconds, after which all is ended


def context():
    """Processes forked from a server that has loaded this module."""
    found = multiprocessing.get_context("forkserver")
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, path])
    try:
        found.set_forkserver_preload(["distributed_helpers"])
        from multiprocessing.forkserver import ensure_running

        ensure_running()
    finally:
        os.environ["PYTHONPATH"] = path
    return found


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def environment(rank, size, port):
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    return {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}


def run(function, *args, size=2):
    """Of each rank function(*args): ("gave", value), ("raised", type, words), or ("died",)."""
    return [each["only"] for each in in_turn({"only": (function, *args)}, size)]


def in_turn(checks, size=2):
    """Of each rank, the results of all checks, {name: (function, *args)}, by name; its "seconds".

    The ranks do one after the other, each at a port of its own. What comes after a rank has died,
    or after LIMIT seconds, has died or is late.
    """
    forked, ports = context(), [free_port() for _ in checks]
    ends = [forked.Pipe(duplex=False) for _ in range(size)]
    processes = [
        forked.Process(target=work, args=(checks, rank, size, ports, there))
        for rank, (_, there) in enumerate(ends)
    ]
    try:
        for process, (_, there) in zip(processes, ends, strict=True):
            process.start()
            there.close()
        found = collected([here for here, _ in ends], checks)
        for process in processes:
            process.join(timeout=LIMIT / 4)
        assert not any(process.is_alive() for process in processes), "a process is left"
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def collected(pipes, checks):
    found, until = {pipe: {} for pipe in pipes}, time.monotonic() + LIMIT
    left, missing = list(pipes), dict.fromkeys(pipes, ("late",))
    while left and (ready := wait(left, max(until - time.monotonic(), 0))):
        for pipe in ready:
            name, result = received(pipe)
            found[pipe][name] = result
            if name is None:
                missing[pipe] = result
                left.remove(pipe)
    return [dict.fromkeys(checks, missing[pipe]) | found[pipe] for pipe in pipes]


def received(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return None, ("died",)


def work(checks, rank, size, ports, pipe):
    take_few_kernels()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a rank says when it ends, here on purpose
    for port, (name, (function, *args)) in zip(ports, checks.items(), strict=True):
        os.environ.update(environment(rank, size, port))
        began = time.monotonic()
        try:
            result = "gave", function(*args)
        except (Exception, SystemExit) as error:
            result = "raised", type(error).__name__, str(error)
        pipe.send((name, result))
        pipe.send((f"seconds of {name}", time.monotonic() - began))


def values(results):
    """What all ranks gave."""
    assert all(kind == "gave" for kind, *_ in results), results
    return [value for _, value in results]


import distributed_programs  # noqa: E402, F401  the server loads them
import split_programs  # noqa: E402, F401
from few_rows_helpers import take_few_kernels  # noqa: E402

from numbsparse.kernels import cores  # noqa: E402

cores.wait(np.ones(1, np.int64), 1)  # Numba has loaded then what it runs compiled functions with
