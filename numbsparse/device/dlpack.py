"""What DLPack's structs in memory say, where the runtime cannot write it."""

import ctypes
from typing import Any

UNSIGNED, BFLOAT = 1, 4  # DLPack's numbers of the kinds of number

# Where the kind of number is: in a DLTensor after its pointer, its device and its ndim; the
# DLTensor begins a DLManagedTensor, and follows 32 bytes in a DLManagedTensorVersioned.
_KIND = {b"dltensor": 20, b"dltensor_versioned": 32 + 20}

_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def as_bfloat16(capsule: Any) -> Any:
    """A capsule that lends an array of uint16, made to lend the same bits as bfloat16."""
    name = _name_of(capsule)
    kind = ctypes.c_uint8.from_address(_pointer_of(capsule, name) + _KIND[name])
    if kind.value != UNSIGNED:
        raise RuntimeError(f"a DLPack capsule of uint16 says {kind.value} for its kind of number")
    kind.value = BFLOAT
    return capsule
