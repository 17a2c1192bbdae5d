"""What the tensor-core kernels are put together from, each part with its meaning in the simulator.

- `ring`: stages in shared memory, walked one after another.
- `turns`: pieces of a sum, added one after another by the blocks of threads that have them.
- `records`: warps that walk a plan, and ask the copy engine for what each step names.
"""
