"""What a decode step takes by rows, draft tokens and context, and where it waits."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams

from rollout_spec.drafting.drafts import Drafts, StepsToCome
from rollout_spec.vllm.proposing.proposer import BatchProposer
from rollout_spec_lab.bench.engine_worker import Watch, make_engine, runner_of, serve, settings_of
from rollout_spec_lab.bench.jobs import EngineJob
from rollout_spec_lab.bench.load import random_prompts
from rollout_spec_lab.bench.waits import waits


def run(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Steps of an engine of ours, by rows, draft tokens of a row and context of a row, after each cell.

    Drafts are forced and mostly wrong: a step's time does not depend on what is accepted.

    job: engine_job, an EngineJob; contexts and nums_rows, ascending; nums_drafts, of a row;
    num_steps, of each kind; deadline, after which nothing more is begun.
    """
    timing = Timing(job)
    # The fewest rows first: their prompts are cached then, and what is cut off is what takes longest.
    cells = [Cell(context, num_rows) for context in job["contexts"] for num_rows in job["nums_rows"]]
    for number, cell in enumerate(cells, start=1):
        timing.time(cell)
        yield timing.found(cells[number:])


class Cell(NamedTuple):
    """So many rows, each with a prompt of as many tokens."""

    context: int
    num_rows: int

    def __str__(self) -> str:
        return f"{self.num_rows} rows of {self.context} tokens"


class Timing:
    """An engine whose steps are timed, cell by cell."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job = job
        self._engine = make_engine(EngineJob(**job["engine_job"]))
        core, runner = self._engine.engine_core.engine_core, runner_of(self._engine)
        self._forced: Any = runner.rollout_spec_proposer
        self._forced.__class__ = ForcedProposer
        self._forced.force(job["nums_drafts"], job["num_steps"])
        self._watch, self._waits = Watch(self._engine), Waits(runner)
        cache = core.vllm_config.cache_config
        self._kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._most = core.scheduler.max_num_scheduled_tokens
        self._seconds: dict[tuple[int, int, float], list[float]] = defaultdict(list)
        self._skipped, self._longest = list[str](), 0.0

    def time(self, cell: Cell) -> None:
        """Serve a cell, or note why it is left out."""
        begin = time.monotonic()
        # Rows whose prompt comes first decode while the others' is read.
        num_tokens = self._forced.num_tokens + cell.num_rows * cell.context // self._most + 1
        if cell.num_rows * (cell.context + num_tokens) > self._kv_tokens:
            self._skipped.append(f"{cell}: more than the {self._kv_tokens:,} tokens of the KV cache")
        elif begin + self._longest > self._job["deadline"]:
            self._skipped.append(f"{cell}: not reached")
        else:
            self._skipped += [
                f"{cell}, {k} drafts: more than the {self._most:,} tokens that a step may have"
                for k in self._job["nums_drafts"]
                if cell.num_rows * (1 + k) > self._most
            ]
            self._serve(cell, num_tokens)
            self._longest = max(self._longest, time.monotonic() - begin)

    def _serve(self, cell: Cell, num_tokens: int) -> None:
        """Each row gets `num_tokens`; what is timed has run before."""
        vocab_size = self._engine.vllm_config.model_config.get_vocab_size()
        prompts = random_prompts(cell.num_rows, vocab_size, seed=cell.context, num_tokens=cell.context)
        params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)] * cell.num_rows
        for counts in (True, False) if cell.context == self._job["contexts"][0] else (False,):
            self._waits.counts = counts
            self._forced.start(cell.num_rows, self._most)
            self._watch.start()
            serve(self._engine, prompts, params)
        line = self._watch.timeline
        columns = zip(line.num_running, line.num_rows, line.num_draft_tokens, line.seconds, strict=True)
        for running, rows, num_drafts, seconds in columns:
            if rows == running == cell.num_rows:
                self._seconds[cell.context, rows, num_drafts / rows].append(seconds)

    def found(self, left: Sequence[Cell]) -> dict[str, Any]:
        """What `run` gives while these cells are still to come."""
        steps = [  # medians of the steps whose rows all had one of these numbers of draft tokens
            {
                "context": context, "num_rows": rows, "num_drafts": int(drafts),
                "seconds": statistics.median(seconds), "num_steps": len(seconds),
            }
            for (context, rows, drafts), seconds in sorted(self._seconds.items())
            if drafts in self._job["nums_drafts"]
        ]  # fmt: skip
        return {
            "steps": steps,
            "waits": self._waits.places,
            "skipped": [*self._skipped, *(f"{cell}: not reached" for cell in left)],
            "settings": settings_of(self._engine.vllm_config),
        }


class ForcedProposer(BatchProposer):
    """Gives as many draft tokens a row as are to be timed, in turn, and wants room for them in each step."""

    to_come = StepsToCome(drafts_wanted=True)

    def force(self, nums_drafts: Sequence[int], num_steps: int) -> None:
        self._nums = [num for num in nums_drafts for _ in range(num_steps)]
        self.num_tokens = len(self._nums) + 1  # that each row needs

    def start(self, num_rows: int, most: int) -> None:
        """Turns begin where so many rows decode, of those whose step has no more than `most` tokens."""
        self._num_rows, self._left = num_rows, iter([k for k in self._nums if num_rows * (1 + k) <= most])

    def draft(self, nums_new: Any, *_: Any, **__: Any) -> Drafts:
        num_rows = len(nums_new)
        num_drafts = next(self._left, 0) if num_rows == self._num_rows and all(nums_new) else 0
        tokens = np.zeros((num_rows, max(self._nums)), np.int32)
        return Drafts(tokens, np.full(num_rows, num_drafts, np.int32))


class Waits:
    """Where the host waits for the device from logits to tokens, while `counts` is true."""

    def __init__(self, runner: Any) -> None:
        self.counts = False
        self.places: dict[str, list[str] | None] = {}  # by plain and with drafts, of the last step
        name = "_sample" if hasattr(runner, "_sample") else "sample"  # MRV1; MRV2
        self._sample = getattr(runner, name)
        setattr(runner, name, self._watched)

    def _watched(self, logits: torch.Tensor, given: Any, *args: Any) -> Any:
        """`given`: on MRV1 what its drafts are, None without any; on MRV2 the batch."""
        if not self.counts:
            return self._sample(logits, given, *args)
        with waits() as places:
            output = self._sample(logits, given, *args)
        has_drafts = given is not None and np.any(given.num_draft_tokens)
        self.places["with drafts" if has_drafts else "plain"] = places
        return output
