"""Ranks for tests: processes forked from one that has loaded the library, so that each starts fast.

A rank runs a function of this module or of a test's; what it returns, or how it ends, comes back.
"""

import multiprocessing
import os
import socket
import time
from pathlib import Path

LIMIT = 30  # seconds, after which all is ended


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


def run(function, *args, size=2, only=None):
    """The result of function(*args) on each rank: ("gave", value), ("raised", words), or ("died",).

    `only` are the ranks that are started.
    """
    forked, port, ranks = context(), free_port(), range(size) if only is None else only
    ends = [forked.Pipe(duplex=False) for _ in ranks]
    processes = [
        forked.Process(target=work, args=(function, args, environment(rank, size, port), there))
        for rank, (_, there) in zip(ranks, ends, strict=True)
    ]
    try:
        for process, (_, there) in zip(processes, ends, strict=True):
            process.start()
            there.close()
        until = time.monotonic() + LIMIT
        return [result(here, until) for here, _ in ends]
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
            process.join()


def result(pipe, until):
    try:
        return pipe.recv() if pipe.poll(max(until - time.monotonic(), 0)) else ("late",)
    except EOFError:
        return ("died",)


def work(function, args, names, pipe):
    os.environ.update(names)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a rank says when it ends, here on purpose
    try:
        pipe.send(("gave", function(*args)))
    except (Exception, SystemExit) as error:
        pipe.send(("raised", type(error).__name__, str(error)))


def values(results):
    """What all ranks gave."""
    assert all(kind == "gave" for kind, *_ in results), results
    return [value for _, value in results]


import distributed_programs  # noqa: E402, F401  the server loads it
