"""Hooks and fixtures of the product's tests, so that these can be run alone too; and its recordings."""

from pathlib import Path

from tests.conftest import (  # noqa: F401
    collect_ignore,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    small_disk,
    warnings_are_seen,
)

DATA = Path(__file__).parents[2] / "tests" / "data"
