"""cffi API-mode build of `rollout_spec.drafting._native`; setup.py names `ffibuilder`.

The public header is the cdef, so that the two cannot drift apart. Paths are relative to the
repository root, where setuptools runs this file.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from cffi import FFI

HEADER = Path("native/rollout_spec_native.h")
# Functions are inlined across the files (a tenth of a draft step); clang's linker may lack the plugin for it.
INLINED = ["-flto"] if "gcc" in (os.environ.get("CC") or sysconfig.get_config_var("CC") or "") else []


def read_cdef(header: Path = HEADER) -> str:
    """The header with its preprocessor lines blanked (not removed: line numbers stay right)."""
    lines = header.read_text(encoding="utf-8").splitlines()
    return "\n".join("" if line.startswith("#") else line for line in lines)


ffibuilder = FFI()
ffibuilder.cdef(read_cdef())
ffibuilder.set_source(
    "rollout_spec.drafting._native",
    '#include "rollout_spec_native.h"',
    sources=[str(path) for path in sorted(Path("native").glob("*.c"))],
    include_dirs=["native"],
    define_macros=[("NDEBUG", None)],  # asserts are for native/tests
    depends=[str(path) for path in sorted(Path("native").glob("*.h"))],
    extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fvisibility=hidden", *INLINED],
    extra_link_args=["-O3", *INLINED],
    py_limited_api=True,
)
