"""Numba's CUDA simulator, made right and quick enough to learn with.

`launch` says which blocks run at once, `threads` how their threads take turns, `arrays` what their
memory is. `accesses` and `clocks` note what threads touch and what orders it; `races`, `counting`
and `actions` read that; `tracing` and `pictures` draw it.
"""

from numba import config

SIMULATED = bool(config.ENABLE_CUDASIM)
"""True where kernels run in numba-cuda's simulator."""
