"""A part of `gpu-check` in a process of its own: `python -m rollout_spec_lab.gpu_check.worker JOB RESULT`.

One that takes long writes what it has found after each cell.
Each imports what it needs, so that a package that cannot be imported costs only the parts that need it.
"""

import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rollout_spec_lab.bench.jobs import reply


def doctor(job: Mapping[str, Any]) -> dict[str, Any]:
    """What `rollout-spec doctor --json` prints."""
    from rollout_spec.doctor.diagnosis import diagnosis_record

    return diagnosis_record()


def verification(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What `bench verify --json` prints, of the cells that there is time for; `skipped`: the others."""
    from rollout_spec_lab.bench.verify import record_of

    for record in record_of(None, job["nums_rows"], job["nums_drafts"], job["vocab_size"]):
        yield record
        if time.monotonic() > job["deadline"]:
            return


def certificate(job: Mapping[str, Any]) -> dict[str, Any]:
    """What `rollout-spec certify --json` prints; its plan is the job's."""
    from rollout_spec.certify.certify import CertifyPlan, certify

    record = certify(CertifyPlan(**job["plan"]))
    record["plan"]["prompts"] = len(record["plan"]["prompts"])
    return record


def run(job: Mapping[str, Any]) -> dict[str, Any] | Iterator[dict[str, Any]]:
    """A job's part: one of the above, or `run` of the module that has its name."""
    own: Any = {"doctor": doctor, "verify": verification, "certify": certificate}
    if (part := job["part"]) in own:
        return own[part](job)
    return importlib.import_module(f"rollout_spec_lab.gpu_check.{part}").run(job)


if __name__ == "__main__":
    reply(run)
