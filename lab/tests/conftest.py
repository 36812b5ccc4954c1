"""The fixtures of all tests; which tests are slow is decided in tests/conftest.py."""

from tests.conftest import pytest_generate_tests, small_disk, warnings_are_seen  # noqa: F401
