"""Start several ranks of a program on this host, where there is no torchrun and no mpirun."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

PATIENCE = 5.0  # seconds for the other ranks to end by themselves after one has failed


def main(arguments: list[str] | None = None) -> int:
    """Run `python program ...` once for each rank; gives the first status that is not 0.

    All of them end with this process, and soon after one of them has failed.
    """
    parser = argparse.ArgumentParser("python -m numbsparse.distributed", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (%(default)s)")
    parser.add_argument("-m", action="store_true", help="the program is a module, as of python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a Python file, its arguments")
    options = parser.parse_args(arguments)
    if options.ranks < 1 or not options.program:
        parser.error("--ranks takes 1 or more, and a program follows")
    with socket.create_server(("127.0.0.1", 0)) as free:  # a port that nobody listens at
        port = free.getsockname()[1]
    run = ["-m", *options.program] if options.m else options.program
    started: list[subprocess.Popen[bytes]] = []
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN:  # as of nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # by way of `finally`
    try:
        started.extend(_start(rank, options.ranks, port, run) for rank in range(options.ranks))
        return _first_failure(started)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in started:
            process.kill()
            process.wait()


def _start(rank: int, size: int, port: int, program: list[str]) -> subprocess.Popen[bytes]:
    own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return subprocess.Popen([sys.executable, *program], env=os.environ | own | at)


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or one has failed and the others have had time to say so."""
    failed, until = 0, float("inf")
    while time.monotonic() < until:
        ended = [process.poll() for process in processes]
        if not failed and (failed := next(filter(None, ended), 0)):
            until = time.monotonic() + PATIENCE
        if None not in ended:
            break
        time.sleep(0.05)
    return abs(failed)


if __name__ == "__main__":
    sys.exit(main())
