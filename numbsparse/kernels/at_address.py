"""A compiled function called at its address: whoever calls it is compiled once, for all of them.

Numba compiles what a function calls into it. Where one of many functions of the same arguments is
to be called, as many callers would be compiled; at an address there is one.
"""

from functools import cache
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.typing import Signature
from numba.extending import intrinsic

from numbsparse.kernels.cores import made_of


@cache
def address_of(kernel: Any) -> int:
    """Where the machine code is of a function that `compiled` made for one signature."""
    made = made_of(kernel)
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))


def call_of(signature: Signature) -> Any:
    """`call(address, args)`, for compiled functions: the result of the one there, of `signature`.

    `args` is the tuple of its arguments.
    """

    @intrinsic
    def call(typing: Any, address: Any, args: Any) -> Any:
        def build(context: Any, builder: Any, _: Any, given: Any) -> Any:
            convention, result = context.call_conv, signature.return_type
            kind = convention.get_function_type(result, signature.args)
            function = builder.inttoptr(given[0], kind.as_pointer())
            values = [
                context.cast(builder, value, one, wanted)
                for value, one, wanted in zip(
                    cgutils.unpack_tuple(builder, given[1]), args, signature.args, strict=True
                )
            ]
            status, value = convention.call_function(
                builder, function, result, signature.args, values
            )
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return value

        return signature.return_type(types.int64, args), build

    return call
