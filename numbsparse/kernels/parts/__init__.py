"""What the tensor-core kernels are put together from, each part with its meaning in the simulator.

- `ring`: stages in shared memory, walked one after another.
- `records`: warps that walk a plan, and ask the copy engine for what each step names.
- `copies`: tiles that the lanes of a warp copy where the copy engine brings no whole ones.
- `tiles`: from swizzled tiles in shared memory to the products of an mma.
- `pieces`: sums in registers, and pieces of a sum that are added in their order.
- `repair`: which sums of split float32 are not finite, and what they are instead.
"""
