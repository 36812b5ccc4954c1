"""native/tests/checks.c for Python: whether an index of the product's module is whole in memory."""

import ctypes
import fcntl
import functools
import subprocess
from pathlib import Path

from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import ffi

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "native"


def check_index(index: SuffixIndex) -> None:
    """Every invariant of an open index (slow). AssertionError: one is broken, and which."""
    broken = _library().rs_index_check(int(ffi.cast("uintptr_t", index._index)))
    assert broken is None, broken.decode()


@functools.cache
def _library() -> ctypes.CDLL:
    """The checks, built from the headers that are there now."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "checks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of tests begin at once
        subprocess.run(["make", "-s", "-C", ROOT / "native", "checks", f"BUILD={BUILD}"], check=True)
    library = ctypes.CDLL(str(BUILD / "checks.so"))
    library.rs_index_check.argtypes = [ctypes.c_void_p]
    library.rs_index_check.restype = ctypes.c_char_p
    return library
