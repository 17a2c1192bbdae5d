"""What NVIDIA's profiler reads of the rungs' forward product, one launch each.

`profile` runs this file under Nsight Compute (`ncu`), which replays every launch of a rung as
often as its counters take, and reads them. The ladder's own shapes say what bounds a rung; the
small one is that of `counted`, whose requests and sectors are counted in the simulator.
"""

import csv
import io
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from numbsparse.bench.contestants import of_rung
from numbsparse.bench.measure import Case, compile_ahead, processes_here
from numbsparse.bench.problem import Problem, matrices
from numbsparse.bench.results import Results, Row, save
from numbsparse.bench.sections import PATIENCE
from numbsparse.device import SIMULATED, require, synchronize
from numbsparse.kernels import ladder
from numbsparse.machine import describe
from numbsparse.simulator import counting

SIMPLE = ("k1_naive", "k3_registers")
TENSOR_CORES = ladder.NAMES.index("s08_tensor_core")  # the first step in float16
SECTIONS = {  # forward products, and the rungs that are read computing each
    "small": (
        (SIMPLE, matrices((64, 96), 32, 1, 64, "float32")),
        (("k5_tensor_core",), matrices((64, 96), 32, 1, 64, "float16")),
    ),
    "float32": (
        (SIMPLE, matrices(8192, 32, 0.1, 8192, "float32")),
        (("k8_small_batch",), matrices(12288, 32, 0.1, 32, "float32")),
    ),
    "float16": (
        (("k5_tensor_core", "k6_hopper"), matrices(8192, 32, 0.1, 8192, "float16")),
        (("k7_small_blocks",), matrices(8192, 8, 0.1, 8192, "float16")),
        (("k9_dense_tiles",), matrices(8192, 8, 0.5, 4096, "float16")),
    ),
    "steps": (
        (ladder.NAMES[:TENSOR_CORES], matrices(8192, 32, 0.1, 8192, "float32")),
        (ladder.NAMES[TENSOR_CORES:], matrices(8192, 32, 0.1, 8192, "float16")),
    ),
}

COUNTED = "counted"  # the section of what the simulator counts

_OF_PEAK = "avg.pct_of_peak_sustained"
METRICS = {
    "seconds": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "threads": "launch__block_size",
    "blocks": "launch__grid_size",
    "warps active": f"sm__warps_active.{_OF_PEAK}_active",
    "instructions": "smsp__inst_executed.sum",
    "issue": f"smsp__issue_active.{_OF_PEAK}_active",
    "alu": f"sm__inst_executed_pipe_alu.{_OF_PEAK}_active",
    "fma": f"sm__pipe_fma_cycles_active.{_OF_PEAK}_active",
    "fma heavy": f"sm__inst_executed_pipe_fmaheavy.{_OF_PEAK}_active",
    "fp64": f"sm__inst_executed_pipe_fp64.{_OF_PEAK}_active",
    "tensor": f"sm__pipe_tensor_cycles_active.{_OF_PEAK}_active",
    "mma": "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "wgmma": "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "L1 data": f"l1tex__data_pipe_lsu_wavefronts.{_OF_PEAK}_active",
    "L2": f"lts__throughput.{_OF_PEAK}_elapsed",
    "L2 requests": f"lts__t_requests.{_OF_PEAK}_elapsed",
    "L2 hits": "lts__t_sector_hit_rate.pct",
    "L2 to L1": f"l1tex__m_xbar2l1tex_read_bytes.{_OF_PEAK}_elapsed",
    "L2 to L1 bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "copied bytes": "l1tex__m_xbar2l1tex_read_bytes_pipe_tma.sum",
    "memory": f"dram__throughput.{_OF_PEAK}_elapsed",
    "memory bytes read": "dram__bytes_read.sum",
    "memory bytes written": "dram__bytes_write.sum",
    "global read requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global read sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global write requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "global write sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "L1 hits": "l1tex__t_sector_pipe_lsu_mem_global_op_ld_hit_rate.pct",
    "shared read requests": "smsp__inst_executed_op_shared_ld.sum",
    "ldmatrix": "sm__inst_executed_op_ldsm.sum",
    "shared wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared read wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared write wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
WAITS = {
    "a barrier": "barrier",
    "wgmma": "gmma",
    "global memory": "long_scoreboard",
    "shared memory": "short_scoreboard",
    "a busy pipe": "math_pipe_throttle",
    "a full memory queue": "mio_throttle",
    "a full load queue": "lg_throttle",
    "the instruction before": "wait",
    "instructions to come": "no_instruction",
    "its turn": "not_selected",
}
METRICS |= {
    f"waits for {what}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
    for what, name in WAITS.items()
}


def profile(json_file: Path | None = None) -> Results:
    """Read the sections, print them, and put them into `json_file`; in the simulator count instead.

    Raises RuntimeError where there is no GPU, no ncu, or ncu fails.
    """
    if not SIMULATED:
        require()
        if shutil.which("ncu") is None:
            raise RuntimeError("ncu, NVIDIA's Nsight Compute, is not on the PATH")
        if (jobs := processes_here()) > 1:
            compile_ahead(cases(), jobs, PATIENCE)
    results: Results = {}
    command = f"{'NUMBA_ENABLE_CUDASIM=1 ' * SIMULATED}python -m numbsparse profile"
    for name in (COUNTED,) if SIMULATED else tuple(SECTIONS):
        if not SIMULATED:
            print(f"{name}: ncu replays each kernel", flush=True)
        rows = list(count("small") if SIMULATED else _read(name))
        results[name] = {"machine": describe("cuda"), "command": command, "rows": rows}
        for row in rows:
            print(f"{name}: {row['rung']}")
            print("".join(f"  {key:34} {value:,}\n" for key, value in row["readings"].items()))
        if json_file is not None:
            save(json_file, {name: results[name]})
    return results


def cases() -> Iterator[Case]:
    """What ncu will look on at, to be compiled before: under ncu that takes longer."""
    for rungs, problem in itertools.chain(*SECTIONS.values()):
        yield from (Case(problem, "forward", kernel) for kernel in rungs)


def count(name: str) -> Iterator[Row]:
    """A row for each rung of a section: what the simulator counts of it."""
    for rungs, problem in SECTIONS[name]:
        for kernel in rungs:
            counted = counting.count(partial(forward, kernel, problem))[-1]
            yield row_of(kernel, problem, _readings(counted))


def row_of(rung: str, of: Problem, readings: dict[str, Any]) -> Row:
    shape = {
        "dtype": of.dtype,
        "in_features": of.in_features,
        "out_features": of.out_features,
        "batch": of.batch,
        "block_size": of.block_size,
        "density": float(f"{of.layout.density:.2g}"),
    }
    return {"rung": rung, "product": "forward", **shape, "readings": readings}


def _readings(counted: counting.Count) -> dict[str, Any]:
    """A count, under the names of the profiler's readings."""
    return {
        "global read requests": counted.global_reads.requests,
        "global read sectors": counted.global_reads.units,
        "global read bytes": counted.global_reads.nbytes,
        "global write requests": counted.global_writes.requests,
        "global write sectors": counted.global_writes.units,
        "shared read requests": counted.shared_reads.requests,
        "shared read wavefronts": counted.shared_reads.units,
        "shared read bytes": counted.shared_reads.nbytes,
        "shared write wavefronts": counted.shared_writes.units,
        "barriers": counted.barriers,
    }


def _read(name: str) -> Iterator[Row]:
    """A row per rung of a section: of several launches the one that took longest."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        options = ("--csv", "--page=raw", "--print-units=base", "--clock-control=none")
        # A mangled name holds the whole path of the module that a kernel stands in.
        names = "--kernel-name-base=mangled", "--print-kernel-base=mangled"
        only = (*names, "--kernel-name=regex:kernels6(matmul|ladder)")
        metrics = f"--metrics={','.join(METRICS.values())}"
        target = (sys.executable, "-m", "numbsparse.pages.profile", name)
        command = ["ncu", *options, *only, metrics, f"--log-file={log}", *target]
        ran = subprocess.run(command, capture_output=True, encoding="utf-8")
        text = log.read_text(encoding="utf-8") if log.exists() else ""
    if ran.returncode or '"Kernel Name"' not in text:
        raise RuntimeError(f"ncu failed: {(ran.stderr or text or ran.stdout).strip()[-500:]}")
    found = list(csv.DictReader(io.StringIO(text[text.index('"ID"') :])))[1:]  # after the units
    for rungs, problem in SECTIONS[name]:
        for kernel in rungs:
            launches = [row for row in found if kernel in row["Kernel Name"]]
            if not launches:
                raise RuntimeError(f"ncu saw no launch of {kernel}")
            longest = max(launches, key=lambda row: _number(row[METRICS["seconds"]]) or 0)
            known = {key: _number(longest.get(metric, "")) for key, metric in METRICS.items()}
            readings = {key: value for key, value in known.items() if value is not None}
            readings["seconds"] /= 1e9  # exact to the last digit, as it is printed
            yield row_of(kernel, problem, readings)


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None  # this card has no such counter
    return int(value) if value.is_integer() else value


def forward(kernel: str, problem: Problem) -> None:
    """y = x @ w by a rung or a step, once."""
    of_rung(problem, "forward", kernel).call()
    synchronize()


if __name__ == "__main__":  # what ncu looks on at: each rung of a section, once
    for rungs, problem in SECTIONS[sys.argv[1]]:
        for kernel in rungs:
            forward(kernel, problem)
