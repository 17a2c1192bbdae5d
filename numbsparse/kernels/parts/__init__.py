"""The parts that tensor-core kernels are made of, each with its meaning in the simulator.

- `aligned`: operands as copies of 16 bytes can read them; `transpose`: a feature-major copy.
- `plans`: what is worked out from a layout once; `calls`: launches that are worked out once.
- `banks`: where pieces of 16 bytes are stored in shared memory, without bank conflicts.
- `copies`: tiles of a matrix or of blocks, loaded by `cp.async`.
- `fragments`, `fragments_tf32`: what a lane holds of an `mma.sync`, and products of tiles.
- `one_by_one`: a loop unrolled before it is compiled.
- `ring`: stages in shared memory, walked one after another; a warp's own ring.
- `records`: warps that walk a plan, and request copies of what each step names.
- `groups`: which lines of a layout are computed together; `regions`: which kept blocks are.
- `deal`, `deal_on_gpu`: which multiprocessor computes what, and when; `shares`: lines cut into
  equal shares; `walk_on_gpu`: from one kept block of a line to the next, and how many are before.
- `swizzle`: tiles of swizzled lines, copied by the copy engine and read as registers of an mma.
- `requests`: tiles that a warp requests, or gathers by `cp.async`, as the records of units say;
  `lanes`: what its lanes do, of rows that begin anywhere too.
- `packed`: w in the order of its steps, as registers of an mma; `stored_blocks`: as it is stored.
- `gates`: a number for each block, read ahead.
- `pixels`: rows of images, loaded where the pixels are.
- `tiles`: from swizzled tiles in shared memory to the products of an mma.
- `words`: what a warp reads or writes together, several words a lane.
- `split`: float32 as tf32, in one or three products; `images`: w split so, once, before the kernel.
- `pieces`: sums in registers, and pieces of a sum, added in their order; `pieces_of_blocks`: those
  that a kernel behind adds.
- `repair`: which sums of split float32 are not finite, and what they are instead.
- `store`, `store_boxes`, `store_float32`: accumulators to y, in three orders; `store_tile`: to any
  rows of y; `store_lines`: those of a warp that has a line of y.
"""
