"""Kernels: for each operation its NumPy meaning first, then what runs it fast."""
