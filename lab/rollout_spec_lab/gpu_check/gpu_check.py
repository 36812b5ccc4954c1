"""All that a machine can say of drafting within a number of minutes, part by part.

Knows neither torch nor vLLM: each part runs in a process of its own (`worker`, `engine_worker`). One that
fails, or has no time, is named in its place, and the others go on.
"""

import dataclasses
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_spec.environment import environment
from rollout_spec_lab.bench import engine
from rollout_spec_lab.bench.engine import make_record, predict
from rollout_spec_lab.bench.jobs import EngineError, TimeLimitError, answers
from rollout_spec_lab.bench.rollouts import write_rollouts
from rollout_spec_lab.gpu_check import ON_MRV2, PARTS
from rollout_spec_lab.gpu_check.plan import CheckPlan

WORKER = "rollout_spec_lab.gpu_check.worker"
RESERVE = 0.05  # of all the time, for what comes after the rollouts
DONE, FAILED, DROPPED = "done", "failed", "dropped"


class Check:
    """A run of a plan; `say` takes a line about what is being done."""

    def __init__(self, plan: CheckPlan, folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
        self._plan, self._folder, self._say = plan, folder, say
        self._began = time.monotonic()
        self._found: dict[str, Any] = dict.fromkeys([*plan.jobs, *PARTS])
        self.parts: list[dict[str, Any]] = []

    def run(self) -> Iterator[dict[str, Any]]:
        """What `rollout-spec-lab gpu-check --json` prints, but for the verdict: after each part, and each
        cell of one, what there is so far.

        `parts` has of each part its status (done, failed or dropped), seconds and reason; what it found is
        under its name, None where it found nothing. A part may take half of the time that is left, the last
        one all of it; the rollouts leave RESERVE.
        """
        for name, job in self._plan.jobs.items():
            for found in self._rollouts() if name == "rollouts" else self._part(name, job):
                self._found[name] = found
                yield self._record()

    def _record(self) -> dict[str, Any]:
        engines = [*(self._found["rollouts"] or {}).get("engines", {}).values()]
        engines += [(self._found.get(name) or {}).get("settings") for name in ("steps" + ON_MRV2, "steps")]
        settings: dict[str, Any] = next(filter(None, engines), {})
        where = {name: settings.get(name, "unknown") for name in ("device", "torch")}
        found = {"parts": self.parts, **self._found, "plan": self._plan.described}
        return {"environment": environment() | where} | found

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _part(self, name: str, job: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
        """What a part has found so far; the last once more when its end is noted."""
        self._show(name)
        began = self._elapsed
        seconds = self._plan.seconds - began
        if name != [*self._plan.jobs][-1]:
            seconds /= 2
        deadline = time.monotonic() + seconds * 0.9  # so that it can end by itself; it has the same clock
        job = {**job, "part": name.removesuffix(ON_MRV2), "deadline": deadline}
        found: dict[str, Any] | None = None
        status, reason = DONE, ""
        try:
            for found in answers(WORKER, job, name, self._folder, max(seconds, 0.0), self._environment(name)):
                if self._plan.rooflines and name.startswith("steps"):
                    self._predict_steps(found)
                yield found
        except TimeLimitError as error:
            if found is None:
                status, reason = DROPPED, _reason(name, error)
        except EngineError as error:
            status, reason = FAILED, _reason(name, error)
        self._note(name, status, began, reason)
        for cell_reason in (found or {}).get("skipped", ()):
            cell, _, why = cell_reason.partition(": ")
            self._note(f"{name}: {cell}", DROPPED, None, why)
        yield found

    def _predict_steps(self, found: Mapping[str, Any]) -> None:
        """Add to each step what the roofline says, if there is one: `roofline_s`."""
        if roofline := self._plan.rooflines.get(found["settings"]["model_runner"]):
            for row in found["steps"]:
                rows, drafts = row["num_rows"], row["num_drafts"]
                num_tokens, num_context = rows * (1 + drafts), rows * row["context"]
                row["roofline_s"] = roofline.seconds(num_tokens, drafts > 0, num_context, num_rows=rows)

    def _show(self, doing: str) -> None:
        self._say(f"gpu-check: {self._elapsed:.0f} s: {doing}")

    def _environment(self, name: str) -> dict[str, str]:
        if name.endswith(ON_MRV2) or name + ON_MRV2 in self._plan.jobs:
            return {"VLLM_USE_V2_MODEL_RUNNER": str(int(name.endswith(ON_MRV2)))}
        return {}

    def _note(self, name: str, status: str, began: float | None, reason: str = "") -> None:
        seconds = 0.0 if began is None else self._elapsed - began
        self.parts.append({"part": name, "status": status, "seconds": seconds, "reason": reason})

    def _rollouts(self) -> Iterator[dict[str, Any] | None]:
        """As many repeats as there is time for, whenever one is complete; in the end, with predictions."""
        plan, began = self._plan.rollouts, self._elapsed
        if isinstance(plan, str):
            self._note("rollouts", DROPPED, began, plan)
            yield None
            return
        served: engine.Served = {method: [] for method in plan.methods}
        failed: dict[str, str] = {}
        longest, until = 0.0, self._plan.seconds * (1.0 - RESERVE)
        for repeat, method in engine.turns(plan.methods, plan.repeats):
            if self._elapsed + longest > until or len(failed) == len(plan.methods):
                break
            if method in failed:
                continue
            self._show(f"rollouts: {method}, repeat {repeat + 1}")
            start = self._elapsed
            try:
                served[method].append(plan.serve(repeat, method, self._folder, until - start))
            except TimeLimitError:
                break
            except EngineError as error:
                failed[method] = _reason(method, error)
            longest = max(longest, self._elapsed - start)
            yield self._served(plan, served, failed)
        record = self._served(plan, served, failed, predicts=True)
        if record is None:
            reason = f"nothing to compare with: {plan.methods[0]} has not served"
            self._note("rollouts", FAILED if failed else DROPPED, began, reason)
        else:
            self._note("rollouts", DONE, began)
            if (repeats := record["load"]["repeats"]) < plan.repeats:
                self._note("rollouts: repeats", DROPPED, None, f"no time for more than {repeats}")
        for method in plan.methods:
            if method in failed:
                self._note(f"rollouts: {method}", FAILED, None, failed[method])
            elif not served[method]:
                self._note(f"rollouts: {method}", DROPPED, None, "no time")
        yield record

    def _served(
        self, plan: engine.EnginePlan, served: engine.Served, failed: Container[str], predicts: bool = False
    ) -> dict[str, Any] | None:
        """The record of the complete repeats of all methods that have served at least once."""
        methods = [method for method in plan.methods if served[method] and method not in failed]
        if plan.methods[0] not in methods:
            return None
        repeats = min(len(served[method]) for method in methods)
        complete = {method: served[method][:repeats] for method in methods}
        plan = dataclasses.replace(plan, methods=methods)
        record = make_record(plan, complete)
        if predicts:
            predict(record, plan, complete, self._plan.rooflines)
        write_rollouts(record, complete, plan.load, self._folder)
        return record


def _reason(name: str, error: Exception) -> str:
    return str(error).removeprefix(f"{name}: ")
