"""Pages made of code and measurements, so that they say what is so.

The tables of BENCHMARKS.md and of the lessons, pictures, what `python -m numbsparse ladder` prints,
and the lessons' notebooks and traces. `committed` reads the results that stand in `bench/results`,
`profile` has NVIDIA's profiler or the simulator count what the lessons' kernels request, `reads`
has the formulas of it, and `opened` counts what a reader opens.
"""
