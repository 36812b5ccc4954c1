"""The boundary to C: the native module, which only this package imports, its errors, the arrays it takes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.drafting._native import ffi as ffi
from rollout_spec.drafting._native import lib as lib

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

# Raised together with RS_ABI_VERSION in native/rollout_spec_native.h.
ABI_VERSION = 30

_INT32 = np.dtype(np.int32)


class NativeError(Exception):
    """A call into the native index failed and, but for `add_to_corpus`, changed nothing.

    The message begins with the argument.
    """


class InvalidArgument(NativeError, ValueError):  # noqa: N818
    """An argument has the wrong type, shape or range, or no open group or sequence has this id."""


class OutOfMemory(NativeError, MemoryError):  # noqa: N818
    """The allocator refused."""


class BudgetExceeded(NativeError, MemoryError):  # noqa: N818
    """The index would grow beyond `max_bytes`."""


def native_version() -> int:
    """The version of the native interface that the compiled module was built from."""
    return int(lib.rs_abi_version()) if hasattr(lib, "rs_abi_version") else 0


if native_version() != ABI_VERSION:
    raise ImportError(
        f"rollout_spec.drafting._native was built from version {native_version()} of its interface, "
        f"this package needs {ABI_VERSION}: build it again (in a checkout: pip install -e .)"
    )

_EXCEPTIONS: dict[int, type[NativeError]] = {
    lib.RS_EINVAL: InvalidArgument,
    lib.RS_EUNKNOWN: InvalidArgument,
    lib.RS_ENOMEM: OutOfMemory,
    lib.RS_EBUDGET: BudgetExceeded,
}


def check_vector(name: str, array: Any, length: int | None) -> None:
    """Raise InvalidArgument unless the array is a contiguous int32 vector of `length` entries, if given."""
    is_vector = type(array) is np.ndarray and array.dtype == _INT32 and array.ndim == 1
    if not (is_vector and array.flags.c_contiguous):
        raise InvalidArgument(f"{name}: must be a contiguous one-dimensional int32 array")
    if length is not None and len(array) != length:
        raise InvalidArgument(f"{name}: has {len(array)} entries, sequences has {length}")


def check_status(status: int, native_error: Any) -> None:
    """Raise the NativeError that a status of the native module stands for, unless it is RS_OK.

    Args:
        native_error: the rs_error * of the call.
    """
    if status != lib.RS_OK:
        raise _EXCEPTIONS.get(status, NativeError)(ffi.string(native_error.message).decode())
