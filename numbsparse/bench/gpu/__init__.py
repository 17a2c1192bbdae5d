"""The benchmark of the GPU, in sections; every result is checked before it is timed."""
