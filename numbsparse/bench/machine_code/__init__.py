"""The machine code of kernels for compute capability 9.0, compiled and compared without a GPU."""

from numbsparse.bench.machine_code.gate import run

__all__ = ["run"]
