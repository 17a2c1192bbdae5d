"""Work spread over this machine's GPUs, a process each."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Found = TypeVar("Found")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def on_each(cards: int, work: Callable[[int], Iterable[Found]]) -> Iterator[Found]:
    """What `work(card)` yields for each card, as it comes; a process sees its own GPU alone.

    A process that dies ends its own part: the others go on.
    """
    spawn, before = get_context("spawn"), os.environ.get(VISIBLE)
    names = before.split(",") if before else [str(card) for card in range(cards)]
    if len(names) < cards:
        raise ValueError(f"{cards} cards, and {VISIBLE}={before} shows {len(names)}")
    ends: list[Connection] = []
    try:
        for card in range(cards):
            end, sender = spawn.Pipe(duplex=False)
            os.environ[VISIBLE] = names[card]
            spawn.Process(target=_send, args=(sender, work, card)).start()
            sender.close()
            ends.append(end)
    finally:
        os.environ.pop(VISIBLE)
        os.environ.update({VISIBLE: before} if before else {})
    while ends:
        wait(ends)
        for end in [end for end in ends if end.poll()]:
            with suppress(EOFError):
                yield end.recv()
                continue
            ends.remove(end)


def _send(sender: Connection, work: Callable[[int], Iterable[Any]], card: int) -> None:
    for found in work(card):
        sender.send(found)
