"""What `python -m numbsparse bench` runs: each result is checked before it is timed."""

from numbsparse.bench.cpu import run as run_cpu
from numbsparse.bench.gpu import SECTIONS, Options
from numbsparse.bench.gpu import run as run_gpu
from numbsparse.bench.gpu.profile import profile
from numbsparse.bench.ladder import table as ladder_table
from numbsparse.bench.machine_code import run as machine_code
from numbsparse.bench.tables import fill

__all__ = [
    "SECTIONS",
    "Options",
    "fill",
    "ladder_table",
    "machine_code",
    "profile",
    "run_cpu",
    "run_gpu",
]
