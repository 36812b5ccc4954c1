"""The engines of the product's tests in vllm-ascend."""

from tests.ascend.conftest import *  # noqa: F403
