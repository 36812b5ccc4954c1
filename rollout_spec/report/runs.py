"""Training runs read back from what verl's loggers wrote."""

import dataclasses
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.config import UserError
from rollout_spec.metrics import PREFIX
from rollout_spec.report.logs import read_log
from rollout_spec.report.responses import looping_share

MAX_DRIFT = 0.05  # above it, a ratio of two runs says as much of the machine as of the drafts
SECONDS = PREFIX + "rollout_seconds"
# What stands in every step of a run that drafts, if it has a token.
_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "tokens_per_step")

_AMOUNTS = re.compile(rf"timing_s/|{PREFIX}|perf/")  # of seconds, tokens and counts, by how they begin

logger = logging.getLogger(__name__)


def _logged(name: str, default: float = math.nan) -> Any:
    """A metric of this name; `default` where it was not logged, NaN where its value is null."""
    return dataclasses.field(default=default, metadata={"name": name})


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step as verl logged it; NaN where a value is missing.

    A step may have no tokens of its own: an asynchronous trainer can get its batch before the weights change,
    and then the step before counts it.
    """

    step: int
    # Metrics of ours, by their own names: the default where they were not logged, and always finite.
    rollout_seconds: float = 0.0
    generated_tokens: float = 0.0
    tokens_per_step: float = 1.0  # a run without drafts takes one step a token
    num_drafts: float = 0.0
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    num_interrupted: float = 0.0  # requests that a weight sync interrupted
    draft_ms: float = _logged(PREFIX + "draft_ms")  # on the host, per engine step
    step_seconds: float = _logged("timing_s/step")
    reward: float = _logged("critic/rewards/mean")
    response_length: float = _logged("response_length/mean")
    entropy: float = _logged("actor/entropy")
    wait_seconds: float = _logged("timing_s/gen")  # the trainer's, for its rollouts
    log_prob_seconds: float = _logged("timing_s/old_log_prob", 0.0)
    update_seconds: float = _logged("timing_s/update_actor")
    trained_tokens: float = _logged("perf/total_num_tokens")  # prompts included

    @property
    def decode_steps(self) -> float:
        return ratio(self.generated_tokens, self.tokens_per_step) if self.generated_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        return ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def update_ms(self) -> float:
        return 1e3 * (self.log_prob_seconds + self.update_seconds)


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    steps: tuple[Step, ...]
    looping_share: float = math.nan
    has_drafter: bool = False  # trained with +rollout.spec=sam, whether or not it drafted anything

    def column(self, name: str) -> list[float]:
        return [getattr(step, name) for step in self.steps]

    def total(self, name: str) -> float:
        return sum(self.column(name))

    @property
    def trains_beside_rollouts(self) -> bool:
        """Whether rollouts were interrupted, or took clearly longer than the trainer waited for them."""
        # Requests start a moment before the wait does; that much does not slow the training.
        waited = (1.0 + MAX_DRIFT) * self.total("wait_seconds")
        return self.total("num_interrupted") > 0 or self.total("rollout_seconds") > waited

    def to_dict(self) -> dict[str, Any]:
        amounts = ("step", "rollout_seconds", "step_seconds", "generated_tokens")
        qualities = ("reward", "response_length", "entropy")
        return {name: for_json(self.column(name)) for name in amounts + qualities} | {
            "tokens_per_step_by_step": for_json(self.column("tokens_per_step")),
            "acceptance_rate_by_step": for_json(self.column("acceptance_rate")),
            "num_drafts": int(self.total("num_drafts")),
            "num_interrupted": int(self.total("num_interrupted")),
            "looping_share": for_json(self.looping_share),
        }


def read_run(path: str | Path, name: str) -> Run:
    """Read the run that tables call `name`: its log (see `logs.read_log`), and its recorded rollouts, if any.

    Raises UserError: nothing there, no step carries rollout times, or a value is no number.
    """
    log = read_log(path)
    # A validation has no rollout times.
    records = [(step, data) for step, data in log.records if data.get(SECONDS) is not None]
    if records and not _is_whole(records[-1][1], [data for _, data in records[:-1]]):
        logger.warning("%s: step %d was not logged to its end, it is left out", log.source, records[-1][0])
        records.pop()
    steps = tuple(step_of(step, data, log.source) for step, data in records)
    if not steps:
        asked = "was the run started with +rollout.spec=sam or +rollout.spec=off?"
        raise UserError(f"{log.source}: no step has {SECONDS}; {asked}")
    # Only a drafter counts them.
    has_drafter = any(PREFIX + "num_failed_steps" in data for _, data in records)
    return Run(name, steps, looping_share(Path(path)), has_drafter)


def _is_whole(last: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every count of a step was logged: tensorboard gets them one by one."""
    num_tokens = last.get(PREFIX + "generated_tokens")
    if num_tokens is None:
        return False
    counts = {PREFIX + name for name in _COUNTS} & {name for data in before for name in data}
    return not num_tokens or counts <= last.keys()


def step_of(number: int, data: Mapping[str, Any], source: str) -> Step:
    values = {}
    for field in dataclasses.fields(Step)[1:]:
        name = field.metadata.get("name", PREFIX + field.name)
        given = data.get(name, field.default)
        try:
            values[field.name] = math.nan if given is None else float(given)  # the file logger's NaN is null
        except (TypeError, ValueError):
            raise UserError(f"{source}: step {number}: {name} is no number: {given!r}") from None
        if not field.metadata and not math.isfinite(values[field.name]):
            raise UserError(f"{source}: step {number}: {name} is no finite number")
        if _AMOUNTS.match(name) and (values[field.name] < 0 or math.isinf(values[field.name])):
            raise UserError(f"{source}: step {number}: {name} must be at least 0 and finite: {given!r}")
    if values["generated_tokens"] and not values["rollout_seconds"]:
        raise UserError(f"{source}: step {number}: {SECONDS} must be above 0, there are tokens: 0")
    if not values["generated_tokens"]:
        values["tokens_per_step"] = math.nan
    return Step(number, **values)


def ratio(numerator: float, denominator: float) -> float:
    """NaN where there is no denominator."""
    return numerator / denominator if denominator else math.nan


def for_json(value: float | Iterable[float]) -> Any:
    """The value, or all of them: JSON has no NaN, so null stands for it."""
    if isinstance(value, Iterable):
        return [for_json(item) for item in value]
    return value if math.isfinite(value) else None
