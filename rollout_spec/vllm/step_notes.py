"""What an engine's scheduler and its workers tell each other with each step, beside what vLLM passes on."""

from typing import Any, NamedTuple

_KEY = "rollout_spec"  # an attribute of a `SchedulerOutput` and of a `ModelRunnerOutput`


class Plan(NamedTuple):
    """What a `SpecScheduler` tells with a step; `TwoDraftersRunner` on MRV1 and `HostDrafts` on MRV2 read it.

    A scheduler of vLLM's own tells nothing, which is read as this.
    """

    num_model_tokens: int | None = None
    """`Report.num_model_tokens` of the step before; None: the drafting worker has not said so yet."""
    num_in_flight: int | None = None
    """Earlier steps whose tokens it does not have yet; None: it waits for the tokens of every step."""
    room: int = 0
    """Draft tokens for which each decoding row has room at most, if it does not wait; 0: there are none."""

    @property
    def is_ahead(self) -> bool:
        return self.num_in_flight is not None

    def num_drafted(self, most: int) -> int:
        """Tokens that a model, which can draft `most`, drafts in it for every row; 0: see `passes_for`."""
        if self.is_ahead and self.room == 0:  # the next step cannot verify what follows this one's tokens
            return 0
        return most if self.num_model_tokens is None else self.num_model_tokens


class Report(NamedTuple):
    """What the worker that drafts tells a `SpecScheduler` with a step's tokens."""

    num_model_tokens: int
    """How many tokens a model is to draft for every row in the next step."""
    nums_drafts: dict[str, int] | None = None
    """Draft tokens that the step has verified, of each request that had some; None: the scheduler waits."""
    drafts_wanted: bool = False
    """Whether the steps that are scheduled from now on are to have room for drafts."""


def attach(output: Any, note: Plan | Report) -> None:
    setattr(output, _KEY, note)


def plan_of(scheduler_output: Any) -> Plan:
    return getattr(scheduler_output, _KEY, Plan())


def report_of(model_runner_output: Any) -> Report | None:
    return getattr(model_runner_output, _KEY, None)
