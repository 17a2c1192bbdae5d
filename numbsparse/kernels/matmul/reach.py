"""What a rung serves, from its limits: the `unsupported` of its contract."""

from collections.abc import Callable
from typing import Any

from numbsparse.device import SIMULATED, compute_capability

Sizes = tuple[int, ...]


def reach(
    rung: str,
    home: str,
    block_sizes: Sizes = (),
    dtypes: tuple[str, ...] = (),
    *,
    below: str = "",
    largest_batch: int | None = None,
    capability: tuple[int, int] = (7, 0),
    later: bool = True,
    refused: Callable[..., str | None] | None = None,
) -> Callable[..., str | None]:
    """unsupported(product, block_size, dtype, place, batch, precision): None, or why, in words.

    What else is said of a call makes no difference to a rung, unless it says what it refused.

    Parameters
    ----------
    rung, home : its name, and "cpu" or "cuda"
    block_sizes, dtypes : what it takes; empty: all
    below : what to say of smaller blocks
    largest_batch : None: any
    capability : the least compute capability; with `later` False, the only one
    refused : of product, block size, dtype, batch, and what else is said of a call: why the rung
        does not serve it, in words after its name; or None
    """

    def unsupported(
        product: str,
        block_size: int,
        dtype: Any,
        place: str,
        batch: int = 1,
        precision: str = "highest",
        *call: Any,
    ) -> str | None:
        if place != home:
            return f"{rung} runs on {'the CPU' if home == 'cpu' else 'a GPU'}"
        reasons = []
        if dtypes and str(dtype) not in dtypes:
            reasons.append(f"takes {', '.join(dtypes)}, got {dtype}")
        if block_sizes and block_size not in block_sizes:
            hint = f"; {below}" if below and block_size < min(block_sizes) else ""
            reasons.append(f"takes block sizes {block_sizes}, got {block_size}{hint}")
        if reasons:
            return f"{rung} {' and '.join(reasons)}"
        if largest_batch is not None and batch > largest_batch:
            return f"{rung} takes batches up to {largest_batch}, got {batch}"
        if place == "cuda" and not SIMULATED:
            here = compute_capability()
            if here < capability or (here != capability and not later):
                needed, got = (".".join(map(str, version)) for version in (capability, here))
                return f"{rung} needs compute capability {needed}, this GPU is {got}"
        reason = refused and refused(product, block_size, str(dtype), batch, *call)
        return reason and f"{rung} {reason}"

    return unsupported
