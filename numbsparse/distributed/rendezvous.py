"""How ranks find each other: all others connect to rank 0, which sees that they fit together."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numbsparse.distributed.links import Links, receive, send

# Seconds until a host that does not answer counts as gone: idle, then a probe each second; and the
# milliseconds of one that is sent to.
KEEP_ALIVE = (
    *(("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4)),
    ("TCP_USER_TIMEOUT", 8000),
)


def met(
    rank: int,
    size: int,
    hello: dict[str, Any],
    timeout: float,
    tell: Callable[[Any], Any] | None = None,
    at: tuple[str, int] = ("", 0),
) -> Links:
    """The links of a rank. All know that rank 0 listens `at` a place, or it listens at any.

    Then `tell` gives what rank 0 gave it, (host, port), to all; the others give None. Raises what
    `gathered` does.
    """
    here = socket.gethostname()
    if rank == 0:
        try:
            listener = socket.create_server(at, backlog=1024)
        except OSError as error:
            raise RuntimeError(f"rank 0 cannot listen at {at[0]}:{at[1]}: {error}") from None
        if tell:
            tell((here, listener.getsockname()[1]))
        return gathered(listener, hello, size, timeout)
    host, port = tell(None) if tell else at
    return joined("127.0.0.1" if host == here else host, port, hello, rank, size, timeout)


def gathered(listener: socket.socket, hello: dict[str, Any], size: int, timeout: float) -> Links:
    """The links of rank 0, when all others have come and said the same.

    Raises RuntimeError where some have not within `timeout` seconds, or are of another version,
    size or backend; the others then raise the same.
    """
    found: dict[int, socket.socket] = {}
    deadline, refused = time.monotonic() + timeout, ""
    with listener:
        while len(found) < size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                link, _ = listener.accept()
            except TimeoutError:
                missing = [str(rank) for rank in range(1, size) if rank not in found]
                late = f"rank {', '.join(missing)} of {size} has not come in {timeout:g} seconds"
                refused = refused or late
                break
            link.settimeout(1)
            try:
                head, _ = receive(link)
                rank, theirs = head["rank"], head["hello"]
                refused = refused or _unlike(rank, theirs, hello)
                if rank in found or not 0 < rank < size:
                    refused = refused or f"two processes say they are rank {rank} of {size}"
            except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
                link.close()  # something else that knocked
                continue
            found[rank] = _kept(link)
            if refused:  # said to all who come soon
                deadline = min(deadline, time.monotonic() + 1)
    for link in found.values():
        with suppress(OSError):
            send(link, {"refused": refused})
    if refused:
        raise RuntimeError(refused)
    return Links(0, size, found)


def joined(
    host: str, port: int, hello: dict[str, Any], rank: int, size: int, timeout: float
) -> Links:
    """The links of another rank. Raises RuntimeError as `gathered` does."""
    deadline = time.monotonic() + timeout
    link = _kept(_connected(host, port, deadline))
    send(link, {"rank": rank, "hello": hello})
    link.settimeout(max(deadline - time.monotonic(), 0) + 2)  # rank 0 says who is missing
    try:
        refused = receive(link)[0]["refused"]
    except (OSError, EOFError, ValueError, KeyError):
        refused = f"rank 0 at {host}:{port} has gone while the ranks met"
    if refused:
        raise RuntimeError(refused)
    link.settimeout(None)
    return Links(rank, size, {0: link})


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(left, 0.001))
        except OSError as error:
            if left < 0.1:
                raise RuntimeError(
                    f"rank 0 does not answer at {host}:{port} ({error}): is it there?"
                ) from None
            time.sleep(0.05)


def _kept(link: socket.socket) -> socket.socket:
    """The socket, which waits for as long as the other side is there, and sends at once."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE:
        if hasattr(socket, name):  # not on every system
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _unlike(rank: int, theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """How a rank differs from rank 0, in a sentence; "" where it does not."""
    for key, value in ours.items():
        if theirs.get(key) != value:
            return f"rank {rank} has {key} {theirs.get(key)}, where rank 0 has {value}"
    return ""
