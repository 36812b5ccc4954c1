"""The order of the tests, and the devices of those that ask for one."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The training first, while this process is small: the engine tests leave gigabytes in it."""
    items.sort(key=lambda item: item.path.name != "test_training.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`torch_device`: the CPU, and a GPU where there is one; nothing is left out where there is none."""
    if "torch_device" in metafunc.fixturenames:
        import torch

        metafunc.parametrize("torch_device", ["cpu", "cuda"][: 1 + torch.cuda.is_available()])
