"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The training first, while this process is small: the engine tests leave gigabytes in it."""
    items.sort(key=lambda item: item.path.name != "test_training.py")
