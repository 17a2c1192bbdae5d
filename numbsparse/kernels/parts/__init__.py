"""The parts that tensor-core kernels are made of, each with its meaning in the simulator.

A kernel is a sentence of five words; `kernels/README.md` has those of the library.

Schedule, who computes what, and when:
- `plans`: what is worked out from a layout once, and launches that are worked out once.
- `groups`, `regions`: which lines of a layout, which kept blocks are computed together.
- `deal`, `plans_on_gpu`: what each multiprocessor computes, in which order, and from one kept block
  to the next; `shares`: lines cut into equal shares; `gates`: a number for each block.
Source, how operands come to a stage:
- `aligned`: operands as copies of 16 bytes can read them; `images`, `packed`: w split
  into tf32, or put in the order of its steps, before the kernel; `stored_blocks`: w as it is.
- `copies`: tiles by `cp.async`; `swizzle`: by the copy engine; `requests`, `lanes`: by a warp, as
  the records of units say; `skewed`: rows that begin anywhere; `pixels`: images; `announce`: what
  the copy engine is told of them, once.
Ring, what waits for what:
- `ring`: stages in shared memory, walked one after another; a warp's own ring.
- `records`: warps that walk a plan, and request copies of what each step names.
Product, what the tiles of a stage add to the sums:
- `banks`: where pieces of 16 bytes are, without bank conflicts; `words`: two values in one, and
  what a warp reads at once.
- `fragments`, `fragments_tf32`, `tiles`: what a lane holds of an mma, and products of tiles;
  `strip`: the sums of a strip; `split`: float32 as tf32; `one_by_one`: a loop unrolled.
Sink, what becomes of the sums:
- `pieces`: added in their order, by who has them or by a kernel behind.
- `store`, `store_float32`, `store_boxes`, `store_pixels`: to y, in three orders or to pixels;
  `store_tile`, `store_lines`: from the sums of an mma; `repair`: those that are not finite.
"""
