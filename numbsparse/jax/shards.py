"""Products of arrays that lie on several devices, under jit: each device computes its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# JAX lowers a partitioned call only where it knows the devices, and looks for what asks for that.
from jax._src.dispatch import prim_requires_devices_during_lowering as lowered_with_devices
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["dealt_by_rows", "lowered_with_devices"]


def dealt_by_rows(call: Callable[..., Any], rule: str) -> Any:
    """The call of two arrays, and four that are static, where "n" of the rule are their rows.

    What else they have is whole on every device, and so is a result that is a sum over the rows.
    """
    is_sum = "n" not in rule.partition("->")[2]

    def shardings(mesh: Any, arrays: Any) -> tuple[Any, Any, Any]:
        """The axes of the mesh that rows lie along, and how operands and result lie."""
        rows = (*arrays[0].sharding.spec, None)[0]
        along, whole = (NamedSharding(mesh, PartitionSpec(axes)) for axes in (rows, None))
        return (rows, (along, along), whole) if is_sum else (rows, (along, whole), along)

    def partition(*of: Any) -> tuple[Any, ...]:
        *static, mesh, arrays, _ = of
        rows, operands, result = shardings(mesh, arrays)

        def on_device(a: Any, b: Any) -> Any:
            y = call(a, b, *static)
            return jax.lax.psum(y, rows) if is_sum and rows else y

        return mesh, on_device, result, operands

    def infer(*of: Any) -> Any:
        *_, mesh, arrays, _ = of
        return shardings(mesh, arrays)[2]

    def dealt(a: Any, b: Any, layout: Any, shape: Any, size: Any, precision: Any) -> Any:
        return call(a, b, layout, shape, size, precision)

    made, how = custom_partitioning(dealt, static_argnums=(2, 3, 4, 5)), {}
    if jax.__version_info__ >= (0, 7):  # earlier ones ask `infer` instead
        whole = tuple(axis for axis in dict.fromkeys(rule) if axis in "cbijk")
        how = {"sharding_rule": rule, "need_replication_factors": whole}
        how |= {"reduction_factors": ("n",)} if is_sum else {}
    made.def_partition(partition, infer, **how)
    return made
