"""All that a machine can say of drafting within a number of minutes, part by part.

Knows neither torch nor vLLM: each part runs in a process of its own (`check_worker`, `engine_worker`). One
that fails, or has no time, is named in its place, and the others go on.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.certify.environment import environment
from rollout_spec.trace import trace_file
from rollout_spec_lab.bench import engine
from rollout_spec_lab.bench.engine import EngineError, TimeLimitError, answer, make_record
from rollout_spec_lab.bench.rollouts import write_rollouts

WORKER = "rollout_spec_lab.gpu_check.worker"
# Of all the time, the most that a part may take. Most need less, and the rollouts have what is left.
SHARES = {"doctor": 0.2, "certify": 0.3, "steps": 0.3, "rollouts": 1.0, "thresholds": 1.0}
RESERVE = 0.05  # of all the time, for what comes behind the rollouts
DONE, FAILED, DROPPED = "done", "failed", "dropped"
WAITS = {"plain": 1, "with drafts": 3}  # as docs/how-it-works/verification.md says of sampled rows

Show = Callable[[str, float], None]  # what is being done, and how many seconds have passed


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        seconds: for all of it.
        certify: the fields of `certify.Plan`.
        steps: the job of `check_worker.steps`, but for its seconds.
        rollouts: with as many of its `repeats` as there is time for.
    """

    seconds: float
    certify: Mapping[str, Any]
    steps: Mapping[str, Any]
    rollouts: engine.Plan


class Check:
    """A run of a plan."""

    def __init__(self, plan: Plan, folder: Path, show: Show = lambda text, seconds: None) -> None:
        self._plan, self._folder, self._show = plan, folder, show
        self._began = time.monotonic()
        self.parts: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Returns: what `rollout-spec-lab gpu-check --json` prints, but for the names of model and load.

        `parts` has of each part its status (done, failed or dropped), seconds and reason; what it found is
        under its name, None where it found nothing.
        """
        found: dict[str, Any] = {
            "doctor": self._part("doctor", {}),
            "certify": self._part("certify", {"plan": dict(self._plan.certify)}),
            "steps": self._part("steps", dict(self._plan.steps)),
            "rollouts": self._rollouts(),
        }
        found["thresholds"] = self._thresholds(found)
        engines = [
            *(found["rollouts"] or {}).get("engines", {}).values(),
            (found["steps"] or {}).get("settings"),
        ]
        settings: dict[str, Any] = next(filter(None, engines), {})
        where = {name: settings.get(name, "unknown") for name in ("device", "torch")}
        return {"environment": environment() | where, "waits_expected": WAITS, "parts": self.parts} | found

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _part(self, name: str, job: dict[str, Any]) -> dict[str, Any] | None:
        self._show(name, self._elapsed)
        began, seconds = self._elapsed, min(SHARES[name] * self._plan.seconds, self._left)
        job |= {"part": name, "seconds": seconds * 0.9}  # so that it can end by itself
        try:
            found = answer(WORKER, job, name, self._folder, max(seconds, 0.0))
        except TimeLimitError as error:
            self._note(name, DROPPED, began, _reason(name, error))
        except EngineError as error:
            self._note(name, FAILED, began, _reason(name, error))
        else:
            self._note(name, DONE, began)
            for reason in found.get("skipped", ()):
                cell, _, why = reason.partition(": ")
                self._note(f"{name}: {cell}", DROPPED, None, why)
            return found
        return None

    @property
    def _left(self) -> float:
        return self._plan.seconds - self._elapsed

    def _note(self, name: str, status: str, began: float | None, reason: str = "") -> None:
        seconds = 0.0 if began is None else self._elapsed - began
        self.parts.append({"part": name, "status": status, "seconds": seconds, "reason": reason})

    def _rollouts(self) -> dict[str, Any] | None:
        """As many repeats as there is time for; in each every method once, each time another one first."""
        plan, began = self._plan.rollouts, self._elapsed
        served: engine.Served = {method: [] for method in plan.methods}
        failed: dict[str, str] = {}
        longest, until = 0.0, self._plan.seconds * (1.0 - RESERVE)
        for repeat, i in itertools.product(range(plan.repeats), range(len(plan.methods))):
            method = plan.methods[(repeat + i) % len(plan.methods)]
            if self._elapsed + longest > until or len(failed) == len(plan.methods):
                break
            if method in failed:
                continue
            self._show(f"rollouts: {method}, repeat {repeat + 1}", self._elapsed)
            start = self._elapsed
            try:
                served[method].append(
                    answer(engine.WORKER, plan.job(repeat, method), method, self._folder, until - start)
                )
            except TimeLimitError:
                break
            except EngineError as error:
                failed[method] = _reason(method, error)
            longest = max(longest, self._elapsed - start)
        return self._record(served, failed, began)

    def _record(
        self, served: engine.Served, failed: Mapping[str, str], began: float
    ) -> dict[str, Any] | None:
        """Of the methods that have served at least once, the repeats that are complete."""
        plan = self._plan.rollouts
        methods = [method for method in plan.methods if served[method] and method not in failed]
        if plan.methods[0] in methods:
            repeats = min(len(served[method]) for method in methods)
            complete = {method: served[method][:repeats] for method in methods}
            record = make_record(dataclasses.replace(plan, methods=methods), complete)
            write_rollouts(record, complete, plan.load.prompts, self._folder)
            self._note("rollouts", DONE, began)
            if repeats < plan.repeats:
                self._note("rollouts: repeats", DROPPED, None, f"no time for more than {repeats}")
        else:
            record = None
            reason = f"nothing to compare with: {plan.methods[0]} has not served"
            self._note("rollouts", FAILED if failed else DROPPED, began, reason)
        for method in plan.methods:
            if method in failed:
                self._note(f"rollouts: {method}", FAILED, None, failed[method])
            elif method not in methods:
                self._note(f"rollouts: {method}", DROPPED, None, "no time")
        return record

    def _thresholds(self, found: Mapping[str, Any]) -> dict[str, Any] | None:
        """By simulation of what the first method has served, with the step times found."""
        rollouts, steps = found["rollouts"], found["steps"]
        if rollouts is None:
            self._note("thresholds", DROPPED, None, "no rollouts to simulate")
            return None
        times = step_times(steps["steps"]) if steps and steps["steps"] else rollouts["step_times"]
        trace = str(trace_file(self._folder, 0))
        job = {"trace": trace, "step_times": times, "max_num_seqs": rollouts["load"]["max_num_seqs"]}
        return self._part("thresholds", job)


def _reason(name: str, error: Exception) -> str:
    return str(error).removeprefix(f"{name}: ")


def step_times(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as `timeline.step_times` has them, of the shortest context."""
    shortest = min(row["context"] for row in steps)
    found: dict[tuple[bool, int], list[Mapping[str, Any]]] = {}
    for row in steps:
        if row["context"] == shortest:
            key = (row["num_drafts"] > 0, row["num_rows"] * (1 + row["num_drafts"]))
            found.setdefault(key, []).append(row)
    return [
        {
            "drafted": drafted,
            "num_tokens": tokens,
            "seconds": sum(row["seconds"] for row in rows) / len(rows),
            "num_steps": sum(row["num_steps"] for row in rows),
        }
        for (drafted, tokens), rows in sorted(found.items())
    ]
