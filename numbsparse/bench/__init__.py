"""What `python -m numbsparse bench` runs: each result is checked before it is timed."""

from numbsparse.bench.matmul import run
from numbsparse.bench.tables import fill

__all__ = ["fill", "run"]
