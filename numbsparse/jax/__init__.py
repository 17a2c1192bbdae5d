"""Block-sparse weights at home in JAX: a pytree, and products under jit, grad and vmap.

Everything here takes and gives JAX's arrays, on the CPU and on a GPU, where work goes to XLA's own
stream. JAX is loaded with this package, never with numbsparse.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError:
    raise ImportError("numbsparse.jax needs JAX: pip install 'numbsparse[jax]'") from None

from numbsparse.jax.matrix import BlockSparse, matmul, sddmm

__all__ = ["BlockSparse", "matmul", "sddmm"]
