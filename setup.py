"""The native module, the packages and the text of the package's page; all else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

IMAGE = re.compile(r"!\[[^]]*\]\([^)]*\)\n*")
LINK = re.compile(r"\[([^]]*)\]\((?!https?:)([^)]*)\)")

# The page is not in the repository, so a picture or a link of the README would lead nowhere from there.
readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
page = LINK.sub(lambda link: f"{link[1]} (`{link[2]}`)", IMAGE.sub("", readme))

setup(
    long_description=page,
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["rollout_spec", "rollout_spec.*"]), "rollout_spec_configs"],
    cffi_modules=["native/build_native.py:ffibuilder"],
    # The module uses the limited API, so one wheel serves CPython 3.11 and 3.12.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
