"""The other ranks, by a socket between rank 0 and each of them: what all call, and who has gone.

Messages are JSON, so that reading one runs nothing, and arrays follow as their bytes.
"""

import json
import os
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

HEADER = struct.Struct("!IQ")  # bytes of JSON, and of what follows it
MOST = 1 << 24  # bytes of JSON that are read
GRACE = 4.0  # seconds for the program to end by itself, before the thread ends it
KILLED = "ended without a word: killed, or out of memory"

Message = tuple[dict[str, Any], bytearray]


class RankLost(RuntimeError):
    """Another rank has gone, or waits in vain: none goes on; the last checkpoint is as it was."""


class Links:
    """The links of one rank: of rank 0 to all others, of the others to rank 0.

    A thread reads what comes: calls, which the program waits for, and news, which have a "rank".
    {"rank": 1, "failed": "why", or ""} says that it ends; {"rank": 1, "waits": 7, "why": "what it
    did"} that it waits for all others before its seventh backward pass: who began that pass already
    never comes. Rank 0 passes on who ends. `lost` is the sentence to end with, once there is one.
    """

    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket]):
        self.rank, self.size, self._sockets = rank, size, sockets
        self._calls = {other: SimpleQueue[Message | None]() for other in sockets}
        self._sending, self._noticed = threading.Lock(), threading.Event()
        self.lost, self._closed = "", False
        self._numbers = list(range(size))  # what ranks are called
        self._gone: set[int] = set()
        self._passes, self._waited = 0, set[int]()  # backward passes begun; before which it waited
        self._waiting: dict[int, tuple[int, str]] = {}
        threading.Thread(target=self._run, name="numbsparse ranks", daemon=True).start()

    def is_part_of(self, whole: "Links", ranks: list[int]) -> None:
        """Call ranks by their numbers in the whole, and know that the program noticed there."""
        self._numbers, self._noticed = ranks, whole._noticed

    def meet(
        self,
        call: dict[str, Any],
        payload: Any = b"",
        answer: Callable[[list[bytearray]], Any] = lambda parts: b"",
    ) -> bytearray:
        """The same call of all ranks: rank 0 answers the payloads of all by the same bytes.

        `answer` runs on rank 0 alone. Raises ValueError on all ranks where their calls differ or it
        raises one, RankLost where one has gone.
        """
        if self.rank:
            self._send(0, call, payload)
            head, own = self._receive(0)
            if "refused" in head:
                raise ValueError(head["refused"])
            return own
        parts, refused, found = [bytearray(payload)], "", b""
        for rank in range(1, self.size):
            head, part = self._receive(rank)
            parts.append(part)
            if head != call and not refused:
                refused = f"rank {rank} {_said(head)}, where rank 0 {_said(call)}"
        try:
            found = b"" if refused else answer(parts)
        except ValueError as error:
            refused = str(error)
        for rank in range(1, self.size):
            self._send(rank, {"refused": refused} if refused else {}, found)
        if refused:
            raise ValueError(refused)
        return bytearray(found)

    def share(self, value: Any, call: str = "share") -> list[Any]:
        """A JSON value of each rank, on all of them."""

        def answer(parts: list[bytearray]) -> bytes:
            return json.dumps([json.loads(part) for part in parts]).encode()

        found: list[Any] = json.loads(self.meet({"call": call}, json.dumps(value).encode(), answer))
        return found

    def check(self) -> None:
        """Raise RankLost where a rank is lost, RuntimeError where this one has left."""
        if self._closed:
            raise RuntimeError("this group is closed: call init again")
        if self.lost:
            self._noticed.set()
            raise RankLost(self.lost)

    def begin_pass(self, why: str = "") -> None:
        """One more backward pass begins; RankLost where another rank waits before it in vain.

        why : where this rank waits for the others before it, what it did
        """
        self._passes += 1
        if why:
            self._waited.add(self._passes)
            self._tell({"rank": self.rank, "waits": self._passes, "why": why})
        self._see_who_waits()
        self.check()

    def close(self, failed: str) -> None:
        """Say good-bye to the others, or why this rank fails."""
        self._closed = True
        self._tell({"rank": self.rank, "failed": failed})
        for link in self._sockets.values():  # closed when the other side has read it
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)

    def _send(self, rank: int, head: dict[str, Any], payload: Any = b"") -> None:
        with self._sending, suppress(OSError):  # the thread sees it, too
            send(self._sockets[rank], head, payload)

    def _tell(self, news: dict[str, Any], source: int | None = None) -> None:
        """All others, but for the one that said it."""
        for rank in self._sockets:
            if rank != source:
                self._send(rank, news)

    def _receive(self, rank: int) -> Message:
        """The next call or answer; what a rank had said comes before the news that it is lost."""
        if self._closed:
            self.check()
        message = self._calls[rank].get()
        if message is None:
            self._calls[rank].put(None)  # for who asks again
            self.check()
            self._noticed.set()
            who, waits = self._name(rank), self._name(self.rank)
            raise RankLost(f"{who} has ended its program while {waits} waits for it")
        return message

    def _name(self, rank: int) -> str:
        return f"rank {self._numbers[rank]}"

    def _run(self) -> None:
        """The thread: read until all others have gone."""
        with selectors.DefaultSelector() as selector:
            for rank, link in self._sockets.items():
                selector.register(link, selectors.EVENT_READ, (rank, link))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, link = key.data
                    try:
                        head, payload = receive(link)
                    except (OSError, EOFError):
                        selector.unregister(link)
                        link.close()
                        if rank not in self._gone:
                            self._hear(rank, KILLED)
                        continue
                    if "waits" in head:
                        self._waiting[rank] = head["waits"], head["why"]
                        self._see_who_waits()
                    elif "rank" in head:
                        self._hear(**head)
                    else:
                        self._calls[rank].put((head, payload))

    def _hear(self, rank: int, failed: str) -> None:
        """That a rank has ended."""
        self._gone.add(rank)
        if self.rank == 0:
            self._tell({"rank": rank, "failed": failed}, source=rank)
        if failed and not self.lost and not self._closed:
            self._lose(f"{self._name(rank)} {failed}")
        elif rank in self._calls:
            self._calls[rank].put(None)

    def _see_who_waits(self) -> None:
        """Whether a rank waits before a pass that this one began without."""
        for rank, (nth, why) in list(self._waiting.items()):
            if nth <= self._passes and nth not in self._waited and not self.lost:
                lost = f"{self._name(rank)} {why} before backward pass {nth}, "
                lost += f"{self._name(self.rank)} did not: all ranks do so before the same pass"
                self._tell({"rank": self.rank, "failed": f"ended too: {lost}"})
                self._lose(lost)

    def _lose(self, why: str) -> None:
        self.lost = why
        for calls in self._calls.values():  # the program may be waiting there
            calls.put(None)
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        """End the process, if the program does not notice: it may be waiting for a GPU."""
        if not self._noticed.wait(GRACE) and not self._closed:
            said = f"numbsparse: {self.lost}; {self._name(self.rank)} ends"
            print(said, file=sys.__stderr__, flush=True)
            os._exit(1)


def _said(call: dict[str, Any]) -> str:
    """ "called all_reduce of float32 (2, 3), sum": what a rank is at."""
    words = [str(tuple(part)) if isinstance(part, list) else str(part) for part in call.values()]
    return f"called {words[0]}{' of ' if len(words) > 1 else ''}{' '.join(words[1:])}"


def send(link: socket.socket, head: dict[str, Any], payload: Any = b"") -> None:
    words, payload = json.dumps(head).encode(), memoryview(payload).cast("B")
    link.sendall(HEADER.pack(len(words), payload.nbytes) + words)
    link.sendall(payload)


def receive(link: socket.socket) -> Message:
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
