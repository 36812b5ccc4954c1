"""Hooks and fixtures of the product's tests; so these can be run alone, too."""

from tests.conftest import (  # noqa: F401
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    small_disk,
    warnings_are_seen,
)
