"""Capture a training step once and replay it: all its launches for the price of one."""

from collections.abc import Callable, Hashable, Iterator
from functools import update_wrapper
from typing import Any

import numpy as np

from numbsparse import device, edits, ops
from numbsparse.autograd import Tensor, is_recording
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import Capture, DeviceArray
from numbsparse.dtypes import check_kind, refuse_masked
from numbsparse.ops.precision import checked_precision
from numbsparse.trees import mapped

MOST_GRAPHS = 16
"""Of one step; calls beyond that many sorts of arguments run as they are, uncaptured."""


def graph(step: Callable[..., Any]) -> "Graph":
    """A function that does what `step` does, with the work of the GPU captured and replayed.

    A step of many small kernels waits for Python to launch them. `graph` lets the first call run as
    it is, captures the second in a CUDA graph, and from the third on launches that: one launch for
    a whole training step, forward, backward and optimizer, with the same results bit for bit; but
    for rounding where a gate is zero, see `matmul`.

    Parameters
    ----------
    step : function
        Takes and returns arrays, Tensors, BlockSparse matrices, None, and tuples, lists and dicts
        of them. Further arguments (numbers, models) are told apart by their value, or identity.
        Calls with other shapes, dtypes or such arguments are captured by themselves.

    Returns
    -------
    Graph, which is called as `step` is
        Arrays among the arguments, NumPy's too, are copied to the GPU's memory that the step reads;
        it gets DeviceArrays. Results are the caller's own, without a way back for `backward`.

    Notes
    -----
    Python runs in the first two calls of each kind only. What changes from call to call must be an
    argument, or live on the GPU. Parameters, gradients and the optimizer's arrays do; followed as
    well are the step count and `lr` of numbsparse's optimizers (set outside), Dropout's counter,
    `train` and `eval`, `no_grad` and `set_precision`. State that the step keeps, as of an LSTM, is
    an argument and a result. Copies to the host (`.numpy()`, `.item()`) raise RuntimeError inside,
    and so does a step that replaces an array which it reads. After an error nothing of the captured
    work has run, and gradients that it left behind hold no values: drop them, as the next call's
    `zero_grad` does.

    Gates of a product that the step neither computes nor writes, nor is given as arguments, are
    taken as they are: a call that finds them changed runs as it is, the next one is captured. Where
    they change within 256 replays each replay reads them, until as many have found them as they
    were.

    A graph stays on the stream of its first call, see `numbsparse.stream`; called on another one,
    both wait. In the simulator every call runs as it is, under the same rules.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> model = ns.nn.Linear(8, 4, block_size=4, seed=0)
    >>> optimizer = ns.nn.optim.Adam(model.parameters())
    >>> def step(x, target):
    ...     loss = ns.nn.functional.mse_loss(model(x), target)
    ...     model.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> step = ns.graph(step)  # then, with model.to("cuda"): loss = step(x, target)
    """
    return Graph(step)


class Graph:
    """What `graph` gives. `captures` counts the graphs that it holds."""

    def __init__(self, step: Callable[..., Any]):
        check_kind("step", step, Callable, "a function")
        update_wrapper(self, step)
        self._step = step
        self._recordings: dict[Hashable, Recording] = {}

    @property
    def captures(self) -> int:
        return sum(recording.is_captured for recording in self._recordings.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if device.is_capturing() or device.current_stream().is_captured:  # it is part of that
            return self._step(*args, **kwargs)
        device.require()
        arrays: list[Any] = []
        settings = is_recording(), checked_precision(None)
        sort = settings, _sort((args, kwargs), arrays)
        recording = self._recordings.get(sort)
        if recording is None:
            with device.on(device.one_gpu({"arguments": arrays})):
                recording = Recording(arrays)
            if len(self._recordings) < MOST_GRAPHS:
                self._recordings[sort] = recording
        with device.joined(device.current_stream(), recording.stream):
            return recording.call(self._step, (args, kwargs), arrays)


class Recording:
    """The captures of one step for one sort of arguments, on the stream of the first call."""

    def __init__(self, arrays: list[Any]):
        self.stream = device.current_stream()
        self._inputs = [device.empty(a.shape, a.dtype) for a in map(_array, arrays)]
        self._ran = False
        self._capture: Capture | None = None
        self._generation = 0
        self._edits: list[edits.Note] = []  # what a replay writes, as of the weights
        self._settled = edits.Settled()
        self._results: Any = None

    @property
    def is_captured(self) -> bool:
        return self._capture is not None

    def call(self, step: Callable[..., Any], arguments: Any, arrays: list[Any]) -> Any:
        """A call of the step with these arguments, whose arrays are given once more as a list."""
        for target, source in zip(self._inputs, map(_array, arrays), strict=True):
            if isinstance(source, DeviceArray) and not source.is_contiguous:
                ops.copy_into(target, source)
            else:
                device.refill(target, source)
                edits.note(target, "a call of a captured step")
        if self._is_stale():
            self._ran, self._capture, self._results = False, None, None
        if self._capture is not None:
            self._capture.launch()
            edits.repeat(self._edits)
            return self._given(self._results)
        if self._ran:
            return self._captured(step, arguments)
        results = self._run(step, arguments)
        self._ran, self._generation = True, device.generation()
        return self._given(results)

    def _is_stale(self) -> bool:
        """Whether what ran or was captured is not what the step would do now."""
        if self._capture is None or self._generation != device.generation():
            return self._generation != device.generation()
        return self._capture.has_lost_memory() or self._settled.is_stale()

    def _run(self, step: Callable[..., Any], arguments: Any) -> Any:
        inputs = iter(self._inputs)
        args, kwargs = mapped(arguments, lambda value: _with(value, inputs))
        return mapped(step(*args, **kwargs), lambda value: _given(value, _device_array))

    def _captured(self, step: Callable[..., Any], arguments: Any) -> Any:
        capture, self._generation = Capture(), device.generation()
        with capture.under_way(), edits.collected() as self._edits, self._settled.taking():
            results = self._run(step, arguments)
        if self._generation != device.generation() or capture.has_lost_memory():
            raise RuntimeError(
                "the step replaces an array that it reads, which no replay of it would see: make "
                "such state an argument and a result of the step, or update it in place"
            )
        if not device.SIMULATED:
            capture.launch()
            self._capture, self._results = capture, results
        return self._given(results)

    def _given(self, results: Any) -> Any:
        """The results as the caller's own: what replays write or read is copied."""
        inputs = {id(array.owner) for array in self._inputs}

        def own(array: DeviceArray) -> DeviceArray:
            shared = device.is_of_a_graph(array) or id(array.owner) in inputs
            return device.copy_of(array) if shared else array

        return mapped(results, lambda value: _given(value, own))


def _sort(value: Any, arrays: list[Any]) -> Hashable:
    """What of an argument tells one sort of calls from another; its arrays go into the list."""
    kind = type(value)
    if isinstance(value, Tensor) and not value.requires_grad:
        return kind, _sort(value.data, arrays)
    if isinstance(value, BlockSparse) and value.place == "cuda":
        where = value.stored_layout, value.shape, value.is_transposed
        return kind, where, _sort(value.values, arrays)
    if isinstance(value, np.ndarray) or device.is_device_operand(value):
        refuse_masked(value, "an argument")
        arrays.append(value)
        return "array", tuple(value.shape), str(value.dtype), _device(value)
    if isinstance(value, list | tuple):
        return kind, tuple(_sort(item, arrays) for item in value)
    if isinstance(value, dict):
        return kind, tuple((key, _sort(item, arrays)) for key, item in value.items())
    if isinstance(value, float | complex | np.inexact):  # 0.0 equals -0.0, and NaN nothing
        return kind, repr(value)
    return kind, value if isinstance(value, Hashable) else _Itself(value)


def _device(value: Any) -> int | None:
    """The number of its GPU, where there are several."""
    return device.one_gpu({"": value}) if device.runtime.several_devices else None


class _Itself:
    """Any object as what equals itself alone."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _with(value: Any, inputs: Iterator[DeviceArray]) -> Any:
    """An argument with the next inputs for its arrays, in the order of `_sort`."""
    if isinstance(value, Tensor) and not value.requires_grad:
        return Tensor(_with(value.data, inputs))
    if isinstance(value, BlockSparse) and value.place == "cuda":
        return value.with_values(next(inputs))
    is_array = isinstance(value, np.ndarray) or device.is_device_operand(value)
    return next(inputs) if is_array else value


def _given(value: Any, function: Callable[[Any], DeviceArray]) -> Any:
    """A result of a step with `function` of its array; a Tensor without its way back."""
    if isinstance(value, Tensor):
        return Tensor(_given(value.data, function))
    if isinstance(value, BlockSparse):
        return value.with_values(function(value.values))
    return None if value is None else function(value)


def _array(source: Any) -> Any:
    return source if isinstance(source, np.ndarray) else device.as_device_array(source)


def _device_array(value: Any) -> DeviceArray:
    if not isinstance(value, DeviceArray):
        raise TypeError(
            "a captured step returns arrays on the GPU, Tensors of them, None, and tuples, lists "
            f"and dicts of those, got {type(value).__name__}"
        )
    return value
