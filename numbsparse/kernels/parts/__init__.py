"""What the tensor-core kernels are put together from, each part with its meaning in the simulator.

- `ring`: stages in shared memory, walked one after another.
- `records`: warps that walk a plan, and ask the copy engine for what each step names.
"""
