"""The two classes of openai/blocksparse, on this library's kernels.

Write ``numbsparse.compat.blocksparse`` for ``blocksparse`` in an import, and an array or a Tensor
where TensorFlow had a placeholder or a variable: the rest of the launch post's example stays. NumPy
arrays, DeviceArrays, Tensors, and those of torch and CuPy come out as they went in. Gradients flow
through Tensors, and with torch's through the product.

================================  ================================================================
openai/blocksparse                here
================================  ================================================================
BlocksparseMatMul(layout, ...)    The same, for blocks of 4 to 128. feature_axis is 1, x being
                                  (N, C), as its README says; its last code had 0 by default.
w_shape, i_shape, blocks, ...     The same; ``sparsity`` is the share of blocks that are kept.
order of the blocks in W          Row by row, as in SciPy's BSR: ``block_coord`` tells where a
                                  block is. ``from_blocksparse`` sorts the blocks of a weight that
                                  was trained there, in Morton's order or column by column.
bsmm(I, W, gate, ...)             The same; no name, bench or dw_dtype.
identity_init, ortho_init         The same; orthonormal is each block column, in a dense layout too.
l2_normalize                      sqrt(epsilon + squares), where theirs took the larger of the two;
                                  the result has the dtype of W.
BlocksparseConv(BCK, TRS, ...)    The same, where channels that are in the same lists come in
                                  multiples of 4: see `numbsparse.patterns.from_bck`. A call copies
                                  the images, because `numbsparse.conv` has channels last.
BlocksparseDeconv                 Left out: `numbsparse.conv_transpose`.
edge_bias, cwise_linear           Left out: arithmetic of Tensors broadcasts.
prune, checker_init               Left out: `numbsparse.nn.utils.prune`.
SparseProj                        Left out: `numbsparse.nn.functional.embedding` gathers.
methods that end in _test         Left out: `numbsparse.testing` compares with NumPy.
functions that end in _grads      Left out: they rewrote TensorFlow's graph.
blocksparse.ewops, .norms, ...    Left out: `numbsparse.nn` has them, and LSTM and optimizers.
================================  ================================================================

After https://github.com/openai/blocksparse; S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for
Block-Sparse Weights", 2017.
"""

from numbsparse.compat.blocksparse.conv import BlocksparseConv
from numbsparse.compat.blocksparse.matmul import BlocksparseMatMul

__all__ = ["BlocksparseConv", "BlocksparseMatMul"]
