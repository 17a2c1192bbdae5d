"""What the tensor-core kernels are put together from, each part with its meaning in the simulator.

- `banks`: where pieces of 16 bytes stand in shared memory.
- `copies`: tiles of a matrix or of blocks, brought by `cp.async`.
- `fragments`, `fragments_tf32`: what a lane holds of an `mma.sync`, and products of tiles.
- `one_by_one`: a loop whose rounds are compiled one by one.
- `ring`: stages in shared memory, walked one after another.
- `records`: warps that walk a plan, and ask the copy engine for what each step names.
"""
