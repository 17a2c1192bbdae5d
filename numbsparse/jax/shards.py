"""Products of arrays that are on several devices, under jit: each device computes its own rows."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


def dealt_by_rows(call: Callable[..., Any], rule: str) -> Any:
    """The call of two arrays, and four that are static, as a primitive with ASKS is lowered to it.

    "n" of the rule are the rows of arrays. What else they have is whole on every device, and so is
    a result that is a sum over the rows.
    """
    is_sum = "n" not in rule.partition("->")[2]

    def shardings(mesh: Any, arrays: Any) -> tuple[Any, Any, Any]:
        """The axes of the mesh that rows lie along, and how operands and result lie."""
        rows = (*getattr(arrays[0].sharding, "spec", ()), None)[0]  # what no mesh deals has none
        along, whole = (NamedSharding(mesh, PartitionSpec(axes)) for axes in (rows, None))
        return (rows, (along, along), whole) if is_sum else (rows, (along, whole), along)

    def partition(*of: Any) -> tuple[Any, ...]:
        *static, mesh, arrays, _ = of
        rows, operands, result = shardings(mesh, arrays)

        def on_device(a: Any, b: Any) -> Any:
            y = call(a, b, *static)
            return jax.lax.psum(y, rows) if is_sum and rows else y

        return mesh, on_device, result, operands

    def infer(*of: Any) -> Any:  # what XLA asks where the rule is not known to it
        *_, mesh, arrays, _ = of
        return shardings(mesh, arrays)[2]

    dealt, how = custom_partitioning(call, static_argnums=(2, 3, 4, 5)), {}
    if jax.__version_info__ >= (0, 7):
        whole = tuple(axis for axis in dict.fromkeys(rule) if axis in "cbijk")
        how = {"sharding_rule": rule, "need_replication_factors": whole}
        how |= {"reduction_factors": ("n",)} if is_sum else {}
    dealt.def_partition(partition, infer, **how)
    return dealt


_same: Any = custom_partitioning(lambda x: x)
_same.def_partition(None, None)
ASKS = jax.make_jaxpr(_same)(0.0)
"""JAX tells a primitive with this parameter, as it does this function, which devices there are."""
