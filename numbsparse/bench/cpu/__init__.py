"""The benchmark of the CPU: NumPy, SciPy and torch beside the rung `k0_cpu`."""

from numbsparse.bench.cpu.run import run

__all__ = ["run"]
