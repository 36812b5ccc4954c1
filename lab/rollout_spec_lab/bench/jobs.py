"""A job for a worker in a process of its own, and what it has found so far.

Both sides: `answers` starts a worker and reads its results, `reply` is what a worker does.
"""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout_spec.config import UserError
from rollout_spec_lab.processes import last_error, started

LOOK_SECONDS = 1.0  # between two looks at what a worker has found


class EngineError(UserError):
    """An engine has failed; the message holds its last error."""


class TimeLimitError(EngineError):
    """It has not ended in the time that it had."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineJob:
    """What `engine_worker` makes an engine of, and what it serves with it."""

    model: str
    dtype: str
    method: str  # a label of `engine.Method`
    engine: Mapping[str, Any]  # further arguments of vLLM's
    spec: Mapping[str, Any]  # fields of `rollout.spec` for ours
    num_speculative_tokens: int | None = None  # None: the method's default
    model_drafter: Mapping[str, Any] | None = None
    seed: int = 0
    natural_ends: bool = False
    prompts: Sequence[Sequence[int]] = ()
    requests: Sequence[Mapping[str, Any]] = ()  # as `Load.requests` gives them
    temperature: float = 1.0
    recorded: Sequence[Sequence[int]] | None = None  # the responses that come whatever is sampled


def answers(
    worker: str, job: Mapping[str, Any] | EngineJob, name: str, folder: Path, seconds: float = math.inf,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Run `python -m WORKER JOB RESULT`; gives what it has found so far, whenever that is more.

    Raises EngineError: it has failed, and job and log stay in `folder`. TimeLimitError: it took longer than
    `seconds`. Messages say the job's `name`. The process has `environment` beside the variables of this one.
    """
    task, result, log = (folder / file for file in ("job.json", "result.json", "engine.log"))
    task.write_text(json.dumps(job, default=dataclasses.asdict))
    result.unlink(missing_ok=True)
    env = {
        **os.environ,
        **environment,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that its drafter can be watched
        "PYTHONSAFEPATH": "1",  # a checkout that nothing was built in would hide the installed package
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    until, said = time.monotonic() + seconds, ""
    with started([sys.executable, "-m", worker, str(task), str(result)], log, env) as process:
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(LOOK_SECONDS, until - time.monotonic())))
            if result.is_file() and (says := result.read_text()) != said:
                said = says
                yield json.loads(said)
            if process.returncode is None and time.monotonic() >= until:
                raise TimeLimitError(f"{name}: not done after {seconds:.0f} s")
    if process.returncode:
        raise EngineError(f"{name}: its process ended with code {process.returncode}: {last_error(log)}")
    for file in (task, result, log):
        file.unlink()


def reply(run: Callable[[dict[str, Any]], dict[str, Any] | Iterator[dict[str, Any]]]) -> None:
    """What a worker does with the job of `answers`, whose files are on its command line."""
    job, result = map(Path, sys.argv[1:])
    found = run(json.loads(job.read_text()))
    for record in (found,) if isinstance(found, dict) else found:
        part = result.with_suffix(".part")
        part.write_text(json.dumps(record))
        part.replace(result)  # whole, whenever it is read


def last(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What a job has found in the end."""
    *_, result = found
    return result
