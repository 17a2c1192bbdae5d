"""The benchmark of the GPU, in sections; every result is checked before it is timed."""

from numbsparse.bench.gpu.options import Options
from numbsparse.bench.gpu.run import run
from numbsparse.bench.gpu.sections import SECTIONS

__all__ = ["SECTIONS", "Options", "run"]
