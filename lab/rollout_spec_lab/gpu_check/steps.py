"""What a decode step takes by rows, draft tokens and context, what sampling takes of it, where it waits."""

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams

from rollout_spec.drafting.drafts import Drafts
from rollout_spec_lab.bench.engine_worker import Watch, make_engine, runner_of, serve, settings_of
from rollout_spec_lab.bench.load import random_prompts
from rollout_spec_lab.bench.waits import can_count_waits, synchronize, waits

BEGAN = time.monotonic()


def measure(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Steps of an engine of ours, by rows, draft tokens of a row and context of a row, after each cell.

    Drafts are forced and mostly wrong: a step's time does not depend on what is accepted.

    Args:
        job: what `engine_worker.make_engine` takes; contexts and nums_rows, ascending; nums_drafts, of a row;
            num_steps, of each kind; seconds, after which nothing more is begun.

    Returns:
        steps and sampling (both tables of `Steps`), skipped (cells without memory, and those that are still
        to come), waits (see `Sampling`) and settings (of the engine).
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
        self._engine = make_engine(dict(job))
        core, runner = self._engine.engine_core.engine_core, runner_of(self._engine)
        self._drafts = ForcedDrafts(job["nums_drafts"], job["num_steps"])
        runner.drafter.draft = self._drafts.step
        self._watch, self._sampling = Watch(self._engine), Sampling(runner)
        cache = core.vllm_config.cache_config
        self._kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._most = core.scheduler.max_num_scheduled_tokens
        self._steps, self._skipped, self._longest = Steps(), list[str](), 0.0

    def time(self, cell: Cell) -> None:
        """Serve a cell, or note why it is left out."""
        begin = time.monotonic()
        # Rows whose prompt comes first decode while the others' is read.
        num_tokens = self._drafts.num_tokens + cell.num_rows * cell.context // self._most + 1
        if cell.num_rows * (cell.context + num_tokens) > self._kv_tokens:
            self._skipped.append(f"{cell}: more than the {self._kv_tokens:,} tokens of the KV cache")
        elif begin + self._longest > BEGAN + self._job["seconds"]:
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
        for mode in ("time", "waits", None) if cell.context == self._job["contexts"][0] else (None,):
            self._sampling.mode = mode
            self._drafts.start(cell.num_rows, self._most)
            self._watch.start()
            serve(self._engine, prompts, params)
        line = self._watch.timeline
        columns = zip(line.num_running, line.num_rows, line.num_draft_tokens, line.seconds, strict=True)
        for running, rows, num_drafts, seconds in columns:
            if rows == running == cell.num_rows:
                self._steps.add(cell.context, rows, num_drafts / rows, seconds)

    def found(self, left: Sequence[Cell]) -> dict[str, Any]:
        """What `measure` gives while these cells are still to come."""
        nums_drafts, nums_rows = self._job["nums_drafts"], self._job["nums_rows"]
        sampling = self._sampling.steps.table(nums_drafts)
        return {
            "steps": self._steps.table(nums_drafts),
            "sampling": [row for row in sampling if row["num_rows"] in nums_rows],
            "waits": self._sampling.waits if can_count_waits() else None,
            "skipped": [*self._skipped, *(f"{cell}: not reached" for cell in left)],
            "settings": settings_of(self._engine.vllm_config),
        }


class ForcedDrafts:
    """A stand-in for `SuffixProposer.draft`: as many draft tokens a row as are to be timed, in turn."""

    def __init__(self, nums_drafts: Sequence[int], num_steps: int) -> None:
        self._nums = [num for num in nums_drafts for _ in range(num_steps)]
        self.num_tokens = len(self._nums) + 1  # that each row needs
        self.start(0, 0)

    def start(self, num_rows: int, most: int) -> None:
        """Turns begin where so many rows decode, of those whose step has no more than `most` tokens."""
        self._num_rows, self._left = num_rows, iter([k for k in self._nums if num_rows * (1 + k) <= most])

    def step(self, nums_new_tokens: Any, *_: Any, **__: Any) -> Drafts:
        all_decode = len(nums_new_tokens) == self._num_rows and all(nums_new_tokens)
        num_drafts, num_rows = next(self._left, 0) if all_decode else 0, len(nums_new_tokens)
        return Drafts(
            np.zeros((num_rows, max(self._nums)), np.int32),
            np.full(num_rows, num_drafts, np.int32),
            drafts_wanted=True,
        )


class Steps:
    """Seconds of steps of one kind."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int, float], list[float]] = defaultdict(list)

    def add(self, context: int, num_rows: int, num_drafts: float, seconds: float) -> None:
        self._seconds[context, num_rows, num_drafts].append(seconds)

    def table(self, nums_drafts: Sequence[int]) -> list[dict[str, Any]]:
        """The median seconds of the steps whose rows all had one of these numbers of draft tokens, sorted."""
        return [
            {
                "context": context, "num_rows": rows, "num_drafts": int(drafts),
                "seconds": statistics.median(seconds), "num_steps": len(seconds),
            }
            for (context, rows, drafts), seconds in sorted(self._seconds.items())
            if drafts in nums_drafts
        ]  # fmt: skip


class Sampling:
    """Watches what a model runner does from logits to tokens.

    Attributes:
        mode: time (how long it takes alone, by rows and draft tokens; its context is 0), waits or None.
        waits: by plain and with drafts, the places where the host waited for the device in the last step of
            the kind.
    """

    def __init__(self, runner: Any) -> None:
        self.mode: str | None = None
        self.steps, self.waits = Steps(), dict[str, list[str]]()
        if hasattr(runner, "_sample"):  # MRV1
            self._runner, self._sample = runner, runner._sample
            runner._sample = self._sample_v1
        else:
            runner.sampler = _Sampler(runner.sampler, self)
            runner.rejection_sampler = _Sampler(runner.rejection_sampler, self)

    def _sample_v1(self, logits: torch.Tensor, metadata: Any) -> Any:
        num_draft_tokens = 0 if metadata is None else len(metadata.draft_token_ids)
        sample = functools.partial(self._sample, logits, metadata)
        return self.watch(sample, self._runner.input_batch.num_reqs, num_draft_tokens)

    def watch(self, sample: Callable[[], Any], num_rows: int, num_draft_tokens: int) -> Any:
        """What `sample` returns."""
        if self.mode == "waits":
            with waits() as places:
                output = sample()
            self.waits["with drafts" if num_draft_tokens else "plain"] = places
            return output
        if self.mode != "time":
            return sample()
        synchronize()
        begin = time.perf_counter()
        output = sample()
        synchronize()
        self.steps.add(0, num_rows, num_draft_tokens / num_rows, time.perf_counter() - begin)
        return output


class _Sampler:
    """One of MRV2's two samplers, watched."""

    def __init__(self, sampler: Any, sampling: Sampling) -> None:
        self._sampler, self._sampling = sampler, sampling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any) -> Any:
        sample = functools.partial(self._sampler, logits, input_batch, *args)
        return self._sampling.watch(sample, input_batch.num_reqs, input_batch.num_draft_tokens)
