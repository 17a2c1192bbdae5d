"""Pages made of code and measurements, so that they say what is so.

The tables of BENCHMARKS.md and of the lessons, what `python -m numbsparse ladder` prints, and the
lessons' notebooks and traces. `committed` reads the results that stand in `bench/results`, `reads`
has the formulas of what is moved, and `walls` counts what a reader opens.
"""
