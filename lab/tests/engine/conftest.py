"""The engines of the product's tests."""

from tests.engine.conftest import *  # noqa: F403
