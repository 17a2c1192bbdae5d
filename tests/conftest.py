"""Without a GPU the kernels run in the CUDA simulator, which must be chosen before numba loads."""

import gc
import os
import re
import sys
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext, suppress
from heapq import heapify, heapreplace
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from runpy import run_path
from zlib import crc32

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: more threads only wait
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # of JAX's CPU
# JAX would take three quarters of a GPU's memory at once, in each process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

gc.disable()  # until all is imported and collected: see `pytest_collection_finish`

HAS_NUMBA_CUDA = find_spec("numba_cuda") is not None
if "numba" not in sys.modules and HAS_NUMBA_CUDA:
    run_path(str(Path(__file__).parents[1] / "examples" / "gpu_or_simulator.py"))

HAS_BFLOAT16 = find_spec("ml_dtypes") is not None
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="ml_dtypes is not installed")
HALVES = ["float16", "bfloat16"] if HAS_BFLOAT16 else ["float16"]


SLOW = {  # of these files most tests take a second or start processes
    "test_bench_gpu", "test_bench_gpu_sections", "test_bench_gpu_timing", "test_changed_operands",
    "test_conv_bench", "test_counting", "test_cpu_upgrade", "test_dealt_on_gpu", "test_distributed",
    "test_distributed_split", "test_drawn_lstm", "test_equal_parameters", "test_examples",
    "test_examples_course", "test_examples_layouts", "test_examples_resume", "test_examples_text",
    "test_float32_products", "test_graph", "test_jax_calls", "test_jax_gpu", "test_jax_products",
    "test_kernel_cache", "test_lessons", "test_light", "test_lstm_again", "test_lstm_streamed",
    "test_machine_code", "test_made_layouts", "test_made_products", "test_many_cards",
    "test_mixed_precision", "test_mixture_of_experts", "test_multiplicative_lstm", "test_mutants",
    "test_notebooks", "test_other_cards",
    "test_other_systems", "test_own_rungs", "test_pixel_scaling", "test_pixelcnn",
    "test_pixelcnn_model", "test_plane", "test_plans_on_gpu", "test_ptx_emitted", "test_races",
    "test_recorded", "test_scaling_runs", "test_sentiment", "test_simulated_threads",
    "test_small_batch", "test_small_blocks", "test_small_float32", "test_small_regions",
    "test_split_weight_grad", "test_steps", "test_torch_compile", "test_torch_distributed",
    "test_torch_gpt", "test_trace", "test_tune", "test_weight_grad_blocks",
}  # fmt: skip


# Of these files most tests run GPU kernels, or import them.
KERNELS = re.compile(
    r"test_(ptx|parts|hopper|races|small|split|weight_grad|streams|steps|simulated|shared|float32|"
    r"ladder|lessons|trace|notebooks|puzzles|profile|counting|compiler|kernel_cache|tune|times|"
    r"graph|plans|dealt|device|conv_bench|bench_gpu|machine_code|own_rungs|lstm_streamed|large|site|"
    r"other_cards|lstm_weight_grad|learned_structure|aligned|contexts|recorded|conv$)"
)


def pytest_addoption(parser):
    group = parser.getgroup("draws", "large calls, drawn anew: `-k large`")
    group.addoption("--draws", type=int, default=1, help="so many of each kind (1)")
    group.addoption("--seed", type=int, default=0, help="the number of the first one (0)")


def is_draw(item):
    """Whether it is one of `pytest -k test_large`."""
    return getattr(item, "function", is_draw).__name__ == "test_large"


def pytest_generate_tests(metafunc):
    """A draw is a test, so that one which fails, or ends its process, is known by its number."""
    if is_draw(metafunc):
        of = metafunc.config.getoption
        first, count = of("--seed", 0), of("--draws", 1)
        metafunc.parametrize("number", range(first, first + count))


def pytest_ignore_collect(collection_path, config):
    """Without numba-cuda, as on macOS, the files that import GPU kernels are left out.

    For the quick tests those without any are: half of the time would go into their imports.
    """
    stem = collection_path.stem
    if config.getoption("markexpr") in ("quick", "quick and not simulator"):
        tested = collection_path.is_dir() or collection_path.parent == Path(__file__).parent
        if stem in SLOW or not tested:
            return True
    importing = KERNELS.match(stem) or stem in (
        "test_matmul",
        "test_ops_elementwise",
        "test_readme",
    )
    return True if not HAS_NUMBA_CUDA and importing else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Of two processes that collect all, the second goes through the files from the last one on.

    Half of the time goes into the byte code of tests, with all that an `assert` says. Where they
    meet each finds what the other has made.
    """
    second = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
    if not second or sys.dont_write_bytecode or session.config.args_source.name != "TESTPATHS":
        return
    for path in sorted(Path(__file__).parent.glob("test_*.py"), reverse=True):
        if not pytest_ignore_collect(path, session.config):
            with suppress(Exception, pytest.skip.Exception):  # said where it is collected
                import_module(path.stem)


def beyond_pairs(items):
    """Those without which every two values of two parameters still meet: at each turn a case is
    taken in which most pairs are new, the first of them; not of float32, which takes three times as
    long, where another has as many. Then those are left out whose pairs others have, too."""
    values = [[(k, repr(v)) for k, v in item.callspec.params.items()] for item in items]
    pairs = [set(combinations(each, 2)) for each in values]
    quick = [not re.search("float32|highest", repr(item.callspec.params)) for item in items]
    wanted, taken = set().union(*pairs), []
    best = [(-len(each), not quick[i], i) for i, each in enumerate(pairs)]  # a heap
    heapify(best)
    while wanted:
        _, slow, i = best[0]
        now = -len(pairs[i] & wanted), slow, i
        if heapreplace(best, now) == now:  # as many are new as when it was looked at
            wanted -= pairs[i]
            taken.append(i)
    times = Counter(pair for i in taken for pair in pairs[i])
    for i in sorted(taken, key=quick.__getitem__):
        if all(times[pair] > 1 for pair in pairs[i]):
            times.subtract(pairs[i])
            taken.remove(i)
    return [item for i, item in enumerate(items) if i not in taken]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Markers that follow from a test's file and values, and what is left out of this run.

    Of a test marked `every(n)` each n-th case runs in the simulator. Drawn calls meet the others.
    No parameter's number of values is a multiple of n: all are met. Of one marked `pairs` those
    run there in which every two values of two parameters meet. With `-m quick` the first case
    of each test runs, but for those that are marked slow, and those in the files of SLOW.
    """
    from numbsparse import device
    from numbsparse.kernels.matmul import RUNGS

    on_gpu = device.is_available() and not device.SIMULATED
    kernels = {"cuda", *(name for name, place in RUNGS.items() if place == "cuda")}
    seen, left, functions = Counter(), [], set()
    paired = defaultdict(list)
    for item in items:
        function, marks = (item.path, getattr(item, "originalname", None)), {}
        for mark in item.iter_markers():
            marks.setdefault(mark.name, []).append(mark)  # the closest one first
        if item.path.stem in SLOW or "slow" in marks:
            item.add_marker("slow")
        elif all(function) and function not in functions:
            functions.add(function)
            item.add_marker("quick")
        values = re.split(r"[-\[\]]", item.name)[1:]
        skips = " ".join(mark.kwargs.get("reason", "") for mark in marks.get("skipif", ()))
        if "gpu" in marks:
            if not on_gpu:
                reason = f"takes a GPU: {marks['gpu'][0].kwargs.get('reason')}"
                item.add_marker(pytest.mark.skip(reason=reason))
        elif (
            KERNELS.match(item.path.stem)
            or "simulator" in skips
            or kernels.intersection(values)
            or is_draw(item)
        ):
            item.add_marker("simulator")
        if device.SIMULATED and "every" in marks:
            if seen[item.function] % marks["every"][0].args[0]:
                left.append(item)
            seen[item.function] += 1
        if device.SIMULATED and "pairs" in marks:
            paired[item.function].append(item)
    left += [item for cases in paired.values() for item in beyond_pairs(cases)]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(map(id, left))
        items[:] = [item for item in items if id(item) not in gone]


def pytest_collection_finish():
    """What was imported and collected stays: nobody looks through it for garbage, now or later.

    Nor as often as usual: compiling and simulating make many objects, most of which live.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    draw_no_constants()


def draw_no_constants():
    """hypothesis looks for numbers to draw in the text of all that is loaded: four seconds in each
    process, and the cases are then others where other tests ran before."""
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants"):
        none = providers._local_constants
        providers._get_local_constants = lambda: none


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """What is left when a file is through stays, too: `gc.collect`, which some tests and examples
    call, would go through all that was ever compiled."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of two processes each begins with a half of the files, and ends with what the other has left.

    By turns they would compile the same kernels at the same time, and each go through all files.
    """
    if config.getvalue("dist") == "load":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Of two processes each sends one report of a test that passes, and not five: half of the time
    that a short test takes."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    if item.nodeid in ended_by:  # another process takes the place of this one
        os._exit(1)
    return True


ended_by = []
"""The draw whose kernel took the GPU from this process."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """A draw that fails says what repeats it, and stops the others if they could but fail."""
    report = (yield).get_result()
    if not (report.failed and is_draw(item)):
        return
    name, number = item.nodeid.partition("[")[0], item.callspec.params["number"]
    again = f"python -m pytest {name} --seed {number}"
    report.sections.append(("to repeat it alone", again))
    if is_gpu_lost():
        ended_by.append(item.nodeid)
        item.session.shouldfail = f"{item.nodeid} took the GPU from this process"


def is_gpu_lost():
    """Whether a kernel ended in an error, after which all calls of its process fail."""
    from numbsparse import device

    try:
        device.streams.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Each test draws numbers of its own, those of its name, and the same ones each time."""
    return np.random.default_rng(crc32(request.node.name.encode()))


@pytest.fixture(scope="session", autouse=True)
def few_kernels():
    """What the CPU compiles for few rows takes a twelfth of a cold run."""
    from few_rows_helpers import take_few_kernels

    take_few_kernels()


@pytest.fixture(autouse=True)
def turns_and_holes(request):
    """In the simulator every other test runs the threads of a block the other way round.

    Who comes first is chance on a GPU, and a barrier is missed in one order alone. Of either half
    every other test finds numbers in memory that nobody has written, where the others find NaN:
    what a kernel leaves out may be repaired with what is NaN.
    """
    from numbsparse import device, testing
    from numbsparse.device import memory

    if not device.SIMULATED and device.is_available():
        device.runtime.make_current(0)  # an earlier test's JAX may have left another GPU current
    number = crc32(request.node.nodeid.encode()) if device.SIMULATED else 0
    memory._hole = memory.HOLES[number // 2 % 2]  # as every test does: nothing to restore
    with testing.in_turns("falling") if number % 2 else nullcontext():
        yield


def of_numba():
    """What the environment tells Numba, which reads it again whenever it has changed."""
    return {name: os.environ[name] for name in os.environ if name.startswith("NUMBA_")}


@contextmanager
def numba_told_the_same(before=None):
    """Fails, and restores what it was, where something else is left in the environment."""
    before = of_numba() if before is None else before
    yield
    if (after := of_numba()) != before:
        for name in after:
            del os.environ[name]
        os.environ.update(before)
        pytest.fail(f"left in the environment: {after}, where it had been {before}")


@pytest.fixture(scope="session")
def told_to_numba():
    """Looked for once: each test restores it."""
    return of_numba()


@pytest.fixture(autouse=True)
def tells_numba_nothing(told_to_numba):
    """Of a test: those after it would have kernels of another kind, simulated ones say."""
    with numba_told_the_same(told_to_numba):
        yield


@pytest.fixture(scope="session")
def compilers():
    """CUDA's, with which other processes compile kernels without a GPU; looked for once."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    try:
        for library in ("nvvm", "nvJitLink", "nvrtc"):
            pathfinder.load_nvidia_dynamic_lib(library)
    except Exception:  # pathfinder raises its own types, one per platform
        pytest.skip("CUDA's compiler libraries were not found: pip install 'numbsparse[cu13]'")


@pytest.fixture
def no_garbage():
    """While a recording of a hundred thousand tuples lives, nobody looks for garbage in them."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def cheap_products(monkeypatch):
    """What products are chosen for a test of something else: in the simulator those of a thread for
    each output, since the tensor cores' take some ten times as long, and have tests of their own.
    """
    from numbsparse import device
    from numbsparse.ops import choice

    if device.SIMULATED:
        rungs = {name: choice.RUNGS[name] for name in ("k0_cpu", "k1_naive")}
        monkeypatch.setattr(choice, "RUNGS", rungs)
    choice.forget()
    yield
    choice.forget()


@pytest.fixture(params=["cpu", "cuda"])
def place(request) -> str:
    """Both homes; "cuda" is a GPU where there is one, and the simulator elsewhere."""
    from numbsparse import device

    if request.param == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    return request.param


@pytest.fixture
def put(place):
    """Put a NumPy array or BlockSparse in the place of this test."""
    from numbsparse import BlockSparse, to_device

    def put(data):
        if isinstance(data, BlockSparse):
            return data.to(place)
        return to_device(data) if place == "cuda" else data

    return put


def host(data) -> np.ndarray:
    """Any result as a NumPy array."""
    from numbsparse import BlockSparse, DeviceArray

    if isinstance(data, BlockSparse):
        return data.toarray()
    return data.numpy() if isinstance(data, DeviceArray) else np.asarray(data)
