"""Build the native module; everything else is in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=["native/build_native.py:ffibuilder"],
    # The module uses the limited API, so one wheel serves CPython 3.11 and 3.12.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
