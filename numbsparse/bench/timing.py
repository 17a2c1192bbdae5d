"""Time calls side by side, in turn, so that a slow moment of the machine meets them all.

On the GPU calls are recorded in a CUDA graph and replayed, which takes the host's share of a launch
out of our times and of the peers'. Replays follow one another: what fits in the L2 cache is found
there by the next one, and larger operands are read from memory each time. They are timed by the
GPU's own clock: a host that other processes keep waiting would make some look twice as long.
"""

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from numbsparse.device import SIMULATED, Capture, is_available, require, runtime, synchronize
from numbsparse.device.streams import LEGACY
from numbsparse.device.waits import no_collection

Call = Callable[[], Any]
Recorder = Callable[[Call, int], Call]

GRAPH = 1e-3  # seconds that a graph should take
SAMPLE = 1e-3  # seconds of replays between two looks at the clock
FEW, MOST = 5, 100  # calls in a graph
TURNS, MOST_TURNS, SAMPLES = 3, 9, 5
AGREE = 1.05  # times as long the second best turn takes, at most
WARM = 0.03  # seconds of replays until a GPU that waited is as quick as it gets


def require_times() -> None:
    """RuntimeError where there is no GPU to be timed."""
    if SIMULATED:
        raise RuntimeError("the simulator's times mean nothing: unset NUMBA_ENABLE_CUDASIM")
    require()


class Graph(NamedTuple):
    """`replay()` runs `call` `calls` times; what that reads and writes lives as long.

    `recorded` : the host only starts it, and the GPU's clock tells how long it takes.
    """

    replay: Call
    calls: int
    call: Call
    recorded: bool = False


def graph_of(recorder: Recorder, call: Call) -> Graph:
    """A graph of about GRAPH seconds. The call has run before, and compiled what it needs."""
    # The host may take longer to call than the GPU to compute: only a replay tells. A graph of one
    # short call would count its launch too, some 4 us of an H200.
    one = Graph(recorder(call, 1), 1, call, recorded=True)
    one.replay()
    if min(_time(one, 1) for _ in range(2)) > GRAPH:
        return one
    few = one._replace(replay=recorder(call, FEW), calls=FEW)
    few.replay()
    calls = max(1, min(MOST, int(GRAPH / _time(few, FEW) * FEW)))
    return few._replace(replay=recorder(call, calls), calls=calls)


def seconds_of(
    graphs: dict[str, Graph], seconds: float = 0.05, pause: float = 0.0
) -> dict[str, float]:
    """Seconds a call of each: the median of a turn, and of the turns the least.

    By the GPU's clock the least of a turn, as other processes may have it for milliseconds. So what
    slows a turn is not counted; there are more turns while the two best ones of a name differ. A
    turn takes a third of `seconds` for each name, and a sample at least. The graphs have run
    before. On the CPU a sample is one call, and turns begin with a pause, as other libraries'
    threads spin on. A GPU that waited for the host is slow at first: it is warmed up.
    """
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    warm = time.perf_counter() + (WARM if seconds and not pause else 0.0)
    while graphs and time.perf_counter() < warm:
        _time(next(iter(graphs.values())), 1)
    took = {name: min(_time(graph, 1) for _ in range(2)) for name, graph in graphs.items()}
    for turn in range(MOST_TURNS if seconds else TURNS):
        if turn >= TURNS and all(map(_settled, samples.values())):
            break
        for name, graph in graphs.items():
            time.sleep(pause)
            repeats = 1 if pause else max(1, int(SAMPLE / took[name]))
            if took[name] < seconds:
                graph.replay()  # brings the caches and the clock to its own state
            end = time.perf_counter() + seconds / TURNS
            taken = [_time(graph, repeats)]
            while time.perf_counter() < end and len(taken) < SAMPLES:
                taken.append(_time(graph, repeats))
            typical = min if graph.recorded else median
            samples[name].append(typical(taken) / graph.calls)
    return {name: min(of_turns) for name, of_turns in samples.items()}


def _settled(times: list[float]) -> bool:
    best, second = sorted(times)[:2]
    return second <= AGREE * best


def record(call: Call, count: int) -> Call:
    """`count` calls of ours as one graph."""
    if SIMULATED:
        return repeated(call, count)
    capture = Capture()
    with capture.under_way():
        repeated(call, count)()
    return capture.launch


def record_torch(call: Call, count: int) -> Call:
    """`count` calls of torch as one graph."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    synchronize()
    # torch.cuda.graph would collect garbage each time, which takes longer than all else here; and
    # what is collected while a stream is captured cannot be freed.
    with no_collection(), torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            repeated(call, count)()
        finally:
            graph.capture_end()
    return graph.replay


def repeated(call: Call, count: int) -> Call:
    """`count` calls as one."""

    def repeat() -> None:
        for _ in range(count):
            call()

    return repeat


def _time(graph: Graph, count: int) -> float:
    """Seconds a replay, of `count` replays from an idle GPU, if there is one, to an idle GPU."""
    wait = synchronize if is_available() else lambda: None
    wait()
    by_gpu = graph.recorded and not SIMULATED
    began = time.perf_counter()
    if by_gpu:
        runtime.driver().cuEventRecord(_events()[0], LEGACY)  # a stream that waits for all others
    for _ in range(count):
        graph.replay()
    if by_gpu:
        runtime.driver().cuEventRecord(_events()[1], LEGACY)
    wait()
    if not by_gpu:
        return (time.perf_counter() - began) / count
    error, milliseconds = runtime.driver().cuEventElapsedTime(*_events())
    if error:
        raise RuntimeError(f"the GPU's clock failed: {error}")
    return float(milliseconds) / 1e3 / count


@cache
def _events() -> tuple[Any, ...]:
    """Where the GPU notes the time, before and behind."""
    return tuple(runtime.driver().cuEventCreate(0)[1] for _ in range(2))
