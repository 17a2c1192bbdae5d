"""Block-sparse weights at home in torch: operators, layers, and a model made sparse in one call.

Everything here takes and gives torch's tensors, on the CPU and on a GPU, is differentiated by
torch's own tape and traced by torch.compile. torch is loaded with this, never with numbsparse.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise ImportError("numbsparse.torch needs torch: pip install 'numbsparse[torch]'") from None

from numbsparse.torch.conv import Conv1d, Conv2d, Conv3d
from numbsparse.torch.exchange import from_nn_state_dict, to_nn_state_dict
from numbsparse.torch.layer import adopt_layouts_
from numbsparse.torch.linear import Linear
from numbsparse.torch.lstm import LSTM
from numbsparse.torch.matrix import BlockSparse, matmul, sddmm
from numbsparse.torch.sparsify import sparsify_

__all__ = [
    "LSTM",
    "BlockSparse",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Linear",
    "adopt_layouts_",
    "from_nn_state_dict",
    "matmul",
    "sddmm",
    "sparsify_",
    "to_nn_state_dict",
]
