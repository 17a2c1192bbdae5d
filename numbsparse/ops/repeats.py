"""Products that come again: what was worked out for them is kept, on a GPU their launches too."""

from collections.abc import Callable
from typing import Any

from numbsparse.device import replay, runtime
from numbsparse.layout import Index, Layout
from numbsparse.ops import choice

C_CONTIGUOUS, ALIGNED = 0x1, 0x100  # of the flags of NumPy's arrays


def replayed(
    layout: Layout, what: tuple[Any, ...], operands: tuple[Any, ...], work: Callable[[], Any]
) -> None:
    """Do the work on operands on a GPU, or start its launches again: see device/replay.py.

    They depend on the layout, on `what`, and on where the operands are.
    """
    if (index := layout.device_index) is None:
        work()
    else:
        replayed_in(index.replays, what, operands, work)


def replayed_in(
    known: dict[Any, Any], what: Any, operands: tuple[Any, ...], work: Callable[[], Any]
) -> None:
    """`replayed` in a table of one's own."""
    if runtime.several_devices:
        work()
    else:
        replay.replayed(known, (what, choice.era), operands, work)


def repeated(known: dict[Any, Any], what: Any, stream: Any, work: Callable[[], Any]) -> None:
    """`replayed` on a stream, of work that depends on `what` alone, in a table of one's own."""
    if runtime.several_devices or runtime.capture is not None:
        work()
    else:
        replay.repeated(known, (what, choice.era, stream.handle), (), stream, work)


def started(known: dict[Any, Any], what: Any, stream: Any) -> bool:
    """Whether launches that `repeated` recorded were started."""
    found = known.get((what, choice.era, stream.handle))
    if found is None or not found.is_whole or found.is_elsewhere:
        return False
    if runtime.several_devices or runtime.capture is not None:
        return False
    found.start((), stream)
    return True


def remember(index: Index, case: Any, what: Any) -> None:
    """Keep what was worked out for a product on the CPU."""
    if len(index.calls) >= choice.MOST:
        index.calls.clear()
    index.calls[case] = what
