"""Kernels compiled before they are needed, by all cores: each otherwise waits for the one before.

Other processes run the same step on a card that is not there (`stand_in`), which takes no memory of
the GPU and computes nothing. Whichever comes to a kernel first compiles it, to the cache on disk.
"""

import io
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from numbsparse.device import kept, runtime, waits
from numbsparse.device.array import DeviceArray, empty, span_of
from numbsparse.patterns.checks import REAL

MOST_PROCESSES = 16  # each takes some 300 MB of the host's memory
STEP, CLAIMS, ERROR = "step.pickle", "claims", "error.txt"


def compile_ahead(
    step: Callable[..., Any], *args: Any, jobs: int | None = None, seconds: float | None = None
) -> int:
    """Compile the GPU kernels that `step(*args)` launches, in several processes at once.

    The first step of a model compiles kernel after kernel, on one core, a second or two for each;
    later runs find them on disk. Before a long first step this lets all cores compile.

    Parameters
    ----------
    step : function
        Called in each process, with copies of what it uses: models and optimizers here stay as they
        are. It may be one that `graph` gave. Values read from the GPU are arbitrary there; should
        the step fail for that, or for another reason, a RuntimeWarning says so, and what it did not
        come to is compiled when it is needed, as ever.
    args : its arguments
    jobs : how many processes; by default one for each core, up to 16
    seconds : for how long at most; by default until all are compiled

    Returns
    -------
    How many kernels were compiled, 0 if all were on disk, or in the simulator. To find that out
    takes as long as a process takes to start, and to run the step.

    Raises
    ------
    TypeError, if step is no function, or it or an argument cannot be pickled, as tensors of another
    library on a GPU; ValueError, if jobs or seconds is not above 0; RuntimeError without a GPU.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> layout = ns.Layout(ns.patterns.random(2, 2, 0.5, seed=0))
    >>> model, x = ns.nn.Linear(64, 64, layout=layout, seed=0), np.ones((8, 64), np.float32)
    >>> def step(x):
    ...     return model(x).sum().backward()
    >>> if ns.device.is_available():
    ...     n_kernels = ns.compile_ahead(step, x)  # after model.to("cuda")
    """
    if not callable(step):
        raise TypeError(f"step takes a function, got {step!r}")
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ValueError(f"jobs takes a number of processes, at least 1, got {jobs!r}")
    is_number = isinstance(seconds, REAL) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and seconds > 0):
        raise ValueError(f"seconds takes a number above 0, got {seconds!r}")
    runtime.require()
    if runtime.SIMULATED:
        return 0
    if jobs is None:
        jobs = min(_cores(), MOST_PROCESSES)
    with TemporaryDirectory() as folder:
        Path(folder, CLAIMS).mkdir()
        card = runtime.compute_capability(), runtime.multiprocessors(), runtime.driver_version()
        Path(folder, STEP).write_bytes(pickle.dumps((sys.path, card, _pickled((step, args)))))
        command = [sys.executable, "-c", f"from {__name__} import work; work({folder!r})"]
        path = os.pathsep.join(filter(None, sys.path))
        workers = [
            subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": path},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(jobs)
        ]
        end = None if seconds is None else monotonic() + seconds
        try:
            for worker in workers:
                worker.wait(None if end is None else max(0.0, end - monotonic()))
        except subprocess.TimeoutExpired:  # the others have had as long
            pass
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        if Path(folder, ERROR).exists():
            error = Path(folder, ERROR).read_text(encoding="utf-8")
            warnings.warn(f"compiled up to an error in step: {error}", RuntimeWarning, stacklevel=2)
        return sum(claim.stat().st_size for claim in Path(folder, CLAIMS).iterdir())


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pickled(value: Any) -> bytes:
    """Functions of the program itself too; arrays on the GPU without their values."""
    from numba import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc,name-defined]
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, DeviceArray):
                of = item.shape, item.dtype, item.strides, span_of(item)
                return _blank, (*of, item.address % 256)
            return super().reducer_override(item)

    into = io.BytesIO()
    try:
        Pickler(into).dump(value)
    except Exception as error:
        raise TypeError(f"step and its arguments take what can be pickled: {error}") from error
    return into.getvalue()


def _blank(
    shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], span: int, offset: int
) -> DeviceArray:
    """An array as large and as aligned as another one, in the same order."""
    bare = empty((span * dtype.itemsize + offset,), "uint8")
    return DeviceArray(bare.address + offset, shape, dtype, strides, bare.owner)


def work(folder: str) -> None:
    """What each process does."""
    from numbsparse.device import stand_in

    sys.path[:], card, step = pickle.loads(Path(folder, STEP).read_bytes())
    capability, multiprocessors, driver = card
    stand_in.install(capability, multiprocessors, _compiling(Path(folder, CLAIMS), driver))
    try:
        with waits.no_collection():
            function, args = pickle.loads(step)
            function(*args)
    except Exception as error:
        Path(folder, ERROR).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


def _compiling(claims: Path, driver: int) -> Callable[[Any, Any], Any]:
    """In place of `kernel_cache.compiled`: compile to disk what no other process has claimed."""
    from numbsparse.device import compiler, kernel_cache

    runtime.driver_version = lambda: driver  # the driver is not asked

    def compiled(kernel: Any, signature: tuple[Any, ...]) -> Any:
        file = kernel_cache.file_of(kernel, signature)
        if file is not None and kept.read(file) is None:
            with suppress(FileExistsError), open(claims / file, "xb") as claim:
                code = compiler.linked(kernel, compiler.lto_ir(kernel, signature)).code
                kept.write(file, kernel_cache.pack("", code))
                claim.write(b"1")
        return object()

    return compiled
