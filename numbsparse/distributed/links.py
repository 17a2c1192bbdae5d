"""Sockets between rank 0 and each other rank: who is there, what they agree on, who has gone.

Each pair has two: one for calls, which the program waits on, and one for news, which a thread
watches. Messages are JSON, so that reading one runs nothing, and arrays follow as their bytes.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numbsparse.distributed.watch import Watch

KINDS = ("calls", "news")
HEADER = struct.Struct("!IQ")  # bytes of JSON, and of what follows it
MOST = 1 << 24  # bytes of JSON that are read
# Seconds until a host that does not answer counts as gone: idle, then a probe each second.
KEEP_ALIVE = (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4))


class Links:
    """The links of one rank: of rank 0 to all others, of the others to rank 0."""

    def __init__(self, rank: int, size: int, sockets: dict[str, dict[int, socket.socket]]):
        self.rank, self.size = rank, size
        self._calls = sockets["calls"]
        self.watch = Watch(rank, self._calls, sockets["news"])

    def meet(
        self, call: dict[str, Any], payload: Any, answer: Callable[[list[bytearray]], list[Any]]
    ) -> bytearray:
        """The same call of all ranks: rank 0 answers each rank's payload by bytes of its own.

        `answer` runs on rank 0 alone. Raises ValueError on all ranks where their calls differ or it
        raises one, RankLost where one has gone.
        """
        if self.rank:
            self._send(0, call, payload)
            head, own = self._receive(0)
            if "refused" in head:
                raise ValueError(head["refused"])
            return own
        parts, refused = [bytearray(payload)], ""
        for rank in range(1, self.size):
            head, part = self._receive(rank)
            parts.append(part)
            if head != call and not refused:
                refused = f"rank {rank} {_said(head)}, where rank 0 {_said(call)}"
        try:
            answers = [] if refused else answer(parts)
        except ValueError as error:
            refused = str(error)
        for rank in range(1, self.size):
            self._send(
                rank, {"refused": refused} if refused else {}, b"" if refused else answers[rank]
            )
        if refused:
            raise ValueError(refused)
        return bytearray(answers[0])

    def share(self, value: Any, call: str = "share") -> list[Any]:
        """A JSON value of each rank, on all of them."""

        def answer(parts: list[bytearray]) -> list[Any]:
            return [json.dumps([json.loads(part) for part in parts]).encode()] * self.size

        found: list[Any] = json.loads(self.meet({"call": call}, json.dumps(value).encode(), answer))
        return found

    def _send(self, rank: int, head: dict[str, Any], payload: Any) -> None:
        with suppress(OSError):
            send(self._calls[rank], head, payload)
            return
        self.watch.refuse(rank)

    def _receive(self, rank: int) -> tuple[dict[str, Any], bytearray]:
        self.watch.check()
        with suppress(OSError, EOFError):
            return receive(self._calls[rank])
        self.watch.refuse(rank)


def _said(call: dict[str, Any]) -> str:
    """ "called all_reduce of float32 (2, 3), sum": what a rank is at."""
    words = [str(tuple(part)) if isinstance(part, list) else str(part) for part in call.values()]
    return f"called {words[0]}{' of ' if len(words) > 1 else ''}{' '.join(words[1:])}"


def send(link: socket.socket, head: dict[str, Any], payload: Any = b"") -> None:
    words, payload = json.dumps(head).encode(), memoryview(payload).cast("B")
    link.sendall(HEADER.pack(len(words), payload.nbytes) + words)
    link.sendall(payload)


def receive(link: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """The next message, and the bytes with it. EOFError where there will be none."""
    n_words, nbytes = HEADER.unpack(_read(link, HEADER.size))
    if n_words > MOST:
        raise EOFError("what comes here is not a message")
    return json.loads(_read(link, n_words)), _read(link, nbytes)


def _read(link: socket.socket, nbytes: int) -> bytearray:
    buffer = bytearray(nbytes)
    left = memoryview(buffer)
    while left:
        got = link.recv_into(left)
        if not got:
            raise EOFError("the other side has gone")
        left = left[got:]
    return buffer


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
        listener = socket.create_server(at, backlog=1024)
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
    found: dict[str, dict[int, socket.socket]] = {kind: {} for kind in KINDS}
    deadline, refused = time.monotonic() + timeout, ""
    with listener:
        while any(len(links) < size - 1 for links in found.values()):
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                link, _ = listener.accept()
            except TimeoutError:
                missing = [str(rank) for rank in range(1, size) if rank not in found["news"]]
                late = f"rank {', '.join(missing)} of {size} has not come in {timeout:g} seconds"
                refused = refused or late
                break
            link.settimeout(1)
            try:
                head, _ = receive(link)
                rank, theirs, known = head["rank"], head["hello"], found[head["kind"]]
                refused = refused or _unlike(rank, theirs, hello) or _unwanted(rank, size, known)
            except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
                link.close()  # something else that knocked
                continue
            known[rank] = _kept(link)
            if refused:  # said to all who come soon
                deadline = min(deadline, time.monotonic() + 1)
    for links in found.values():
        for link in links.values():
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
    found = {kind: {0: _kept(_connected(host, port, deadline))} for kind in KINDS}
    for kind, links in found.items():
        send(links[0], {"rank": rank, "kind": kind, "hello": hello})
    for links in found.values():
        links[0].settimeout(max(deadline - time.monotonic(), 0) + 2)  # rank 0 says who is missing
        try:
            refused = receive(links[0])[0]["refused"]
        except (OSError, EOFError, ValueError, KeyError):
            refused = f"rank 0 at {host}:{port} has gone while the ranks met"
        if refused:
            raise RuntimeError(refused)
        links[0].settimeout(None)
    return Links(rank, size, found)


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


def _unwanted(rank: Any, size: int, known: dict[int, Any]) -> str:
    if rank in known or not 0 < rank < size:
        return f"two processes say they are rank {rank} of {size}"
    return ""
