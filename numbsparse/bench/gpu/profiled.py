"""What ncu looks on at: each rung of a section of `profile`, once."""

from __future__ import annotations

import sys

from numbsparse.bench.gpu.profile import SECTIONS, forward

if __name__ == "__main__":
    for case in SECTIONS[sys.argv[1]]:
        problem = case.problem()
        for kernel in case.rungs:
            forward(kernel, problem)
