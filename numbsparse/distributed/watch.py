"""A thread that knows which ranks have gone, and ends this process where it would wait for them."""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
from contextlib import suppress
from typing import NoReturn

GRACE = 4.0  # seconds for the program to end by itself, before the thread ends it
KILLED = "ended without a word: killed, or out of memory"


class RankLost(RuntimeError):
    """Another rank has gone, so this one cannot go on; the last checkpoint is as it was."""


class Watch:
    """What is known of the others. News are lines of JSON: {"rank": 1, "failed": "why", or ""}.

    Rank 0 passes on what the others say. `lost` is the sentence to end with, once there is one.
    {"rank": 1, "compares": 7} says that it waits to compare layouts before its seventh backward
    pass, as all do that have set one: who began that pass already never comes.
    """

    def __init__(self, rank: int, calls: dict[int, socket.socket], news: dict[int, socket.socket]):
        self.rank, self._calls, self._news = rank, calls, news
        self.lost, self._numbers = "", list[int]()
        self.left: set[int] = set()  # those that ended as they should
        self._known, self._noticed = threading.Event(), threading.Event()
        self._closed = False
        self._passes, self._compared = 0, set[int]()  # this rank's, and before which it compares
        self._comparing: dict[int, int] = {}  # the pass of each other rank that has told of one
        threading.Thread(target=self._run, name="numbsparse ranks", daemon=True).start()

    def is_part_of(self, whole: Watch, ranks: list[int]) -> None:
        """Call ranks by their numbers in the whole, and know that the program noticed there."""
        self._numbers, self._noticed = ranks, whole._noticed

    def _name(self, rank: int) -> str:
        return f"rank {self._numbers[rank] if self._numbers else rank}"

    def check(self) -> None:
        """Raise RankLost where a rank is lost, RuntimeError where this one has left."""
        if self._closed:
            raise RuntimeError("this group is closed: call init again")
        if self.lost:
            self._noticed.set()
            raise RankLost(self.lost)

    def begin_pass(self, compares: bool) -> None:
        """One more backward pass begins; RankLost where another rank set layouts before it alone.

        compares : whether this rank did, and compares them with the others before it goes on
        """
        self._passes += 1
        if compares:
            self._compared.add(self._passes)
            self._tell_all({"rank": self.rank, "compares": self._passes})
        self._see_who_compares()
        self.check()

    def _see_who_compares(self) -> None:
        for rank, nth in list(self._comparing.items()):
            if nth <= self._passes and nth not in self._compared and not self.lost:
                why = (
                    f"{self._name(rank)} set a layout before backward pass {nth}, "
                    f"{self._name(self.rank)} did not: all ranks set theirs before the same pass"
                )
                self._tell_all({"rank": self.rank, "failed": f"ended too: {why}"})
                self._lose(why)

    def refuse(self, rank: int) -> NoReturn:
        """Raise RankLost: the link to this rank is broken."""
        self._known.wait(2)
        self.check()
        self._noticed.set()
        raise RankLost(
            f"{self._name(rank)} has ended its program while {self._name(self.rank)} waits for it"
        )

    def close(self, failed: str) -> None:
        """Say good-bye to the others, or why this rank fails."""
        self._closed = True
        self._tell_all({"rank": self.rank, "failed": failed})
        for link in self._news.values():  # closed when the other side has read it
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)
        for link in self._calls.values():
            link.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._news.items():
                selector.register(link, selectors.EVENT_READ, (rank, bytearray()))
            while selector.get_map():
                for key, _ in selector.select():
                    (rank, pending), got = key.data, b""
                    link = self._news[rank]
                    with suppress(OSError):
                        got = link.recv(65536)
                    *lines, pending[:] = bytes(pending + got).split(b"\n")
                    for line in lines:
                        self._hear(**json.loads(line))
                    if not got:
                        selector.unregister(link)
                        link.close()
                        if rank not in self.left:
                            self._hear(rank, KILLED)

    def _hear(self, rank: int, failed: str = "", compares: int = 0) -> None:
        if compares:
            self._comparing[rank] = compares
            self._see_who_compares()
            return
        self.left.add(rank)
        if self.rank == 0:
            for other, link in self._news.items():
                if other != rank:
                    _tell(link, {"rank": rank, "failed": failed})
        if failed and not self.lost and not self._closed:
            self._lose(f"{self._name(rank)} {failed}")

    def _lose(self, why: str) -> None:
        self.lost = why
        self._known.set()
        for link in self._calls.values():  # the program may be waiting there
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._end, daemon=True).start()

    def _tell_all(self, message: dict[str, object]) -> None:
        for link in self._news.values():
            _tell(link, message)

    def _end(self) -> None:
        """End the process, if the program does not notice: it may be waiting for a GPU."""
        if not self._noticed.wait(GRACE) and not self._closed:
            said = f"numbsparse: {self.lost}; {self._name(self.rank)} ends"
            print(said, file=sys.__stderr__, flush=True)
            os._exit(1)


def _tell(link: socket.socket, message: dict[str, object]) -> None:
    with suppress(OSError):
        link.sendall(json.dumps(message).encode() + b"\n")
