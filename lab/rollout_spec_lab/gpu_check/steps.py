"""What a decode step takes by rows, draft tokens and context, what sampling takes of it, where it waits."""

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams

from rollout_spec_lab.bench.engine_worker import Watch, make_engine, runner_of, serve, settings_of
from rollout_spec_lab.bench.waits import can_count_waits, synchronize, waits

BEGAN = time.monotonic()


def measure(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Steps of an engine of ours, by rows, draft tokens of a row and context of a row, after each cell.

    Drafts are forced and mostly wrong: a step's time does not depend on what is accepted.

    Args:
        job: of `engine_worker.make_engine`; contexts and nums_rows, ascending; nums_drafts, of a row;
            num_steps, of each kind; seconds, after which nothing more is begun.

    Returns:
        steps and sampling (both tables of `Steps`), skipped (cells without memory, and those that are still
        to come), waits (see `Sampling`) and settings (of the engine).
    """
    engine = make_engine(dict(job))
    core = engine.engine_core.engine_core
    runner = runner_of(engine)
    drafts = ForcedDrafts(job["nums_drafts"], job["num_steps"])
    drafts.take_the_place_of(runner.drafter)
    watch, sampling = Watch(engine), Sampling(runner)
    cache = core.vllm_config.cache_config
    kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    most = core.scheduler.max_num_scheduled_tokens
    found, skipped, longest = Steps(), list[str](), 0.0
    # The fewest rows first: their prompts are cached then, and what is cut off is what takes longest.
    cells = [(context, num_rows) for context in job["contexts"] for num_rows in job["nums_rows"]]
    for number, (context, num_rows) in enumerate(cells, start=1):
        begin = time.monotonic()
        cell = _name(context, num_rows)
        prompts = _random_prompts(engine, num_rows, context)
        # Rows whose prompt comes first decode while the others' is read.
        num_tokens = drafts.num_tokens + num_rows * context // most + 1
        if num_rows * (context + num_tokens) > kv_tokens:
            skipped.append(f"{cell}: more than the {kv_tokens:,} tokens of the KV cache")
        elif begin + longest > BEGAN + job["seconds"]:
            skipped.append(f"{cell}: not reached")
        else:
            skipped += [
                f"{cell}, {k} drafts: more than the {most:,} tokens that a step may have"
                for k in job["nums_drafts"]
                if num_rows * (1 + k) > most
            ]
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            # What is timed has run before.
            for mode in ("time", "waits", None) if context == job["contexts"][0] else (None,):
                sampling.mode = mode
                drafts.start(num_rows, most)
                watch.start()
                serve(engine, prompts, [params] * num_rows)
            line = watch.timeline
            columns = zip(line.num_running, line.num_rows, line.num_draft_tokens, line.seconds, strict=True)
            for running, rows, num_drafts, seconds in columns:
                if rows == running == num_rows:
                    found.add(context, rows, num_drafts / rows, seconds)
            longest = max(longest, time.monotonic() - begin)
        yield {
            "steps": found.table(job["nums_drafts"]),
            "sampling": [
                row for row in sampling.steps.table(job["nums_drafts"]) if row["num_rows"] in job["nums_rows"]
            ],
            "waits": sampling.waits if can_count_waits() else None,
            "skipped": skipped + [f"{_name(*cell)}: not reached" for cell in cells[number:]],
            "settings": settings_of(core.vllm_config),
        }


def _name(context: int, num_rows: int) -> str:
    return f"{num_rows} rows of {context} tokens"


class ForcedDrafts:
    """A stand-in for `SuffixProposer.draft`: as many draft tokens a row as are to be timed, in turn."""

    def __init__(self, nums_drafts: Sequence[int], num_steps: int) -> None:
        self._nums = [num for num in nums_drafts for _ in range(num_steps)]
        self.num_tokens = len(self._nums) + 1  # that each row needs
        self.start(0, 0)

    def take_the_place_of(self, proposer: Any) -> None:
        """Every step is to wait for drafts; no drafter runs that would say otherwise."""
        proposer.drafter.next_step_waits = True
        proposer.draft = self.step

    def start(self, num_rows: int, most: int) -> None:
        """Turns begin where so many rows decode, of those whose step has no more than `most` tokens."""
        self._num_rows, self._left = num_rows, iter([k for k in self._nums if num_rows * (1 + k) <= most])

    def step(self, nums_new_tokens: list[int], *_: Any, **__: Any) -> list[list[int]]:
        all_decode = len(nums_new_tokens) == self._num_rows and all(nums_new_tokens)
        num_drafts = next(self._left, 0) if all_decode else 0
        return [[0] * num_drafts for _ in nums_new_tokens]


class Steps:
    """Seconds of steps of one kind."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int, float], list[float]] = defaultdict(list)

    def add(self, context: int, num_rows: int, num_drafts: float, seconds: float) -> None:
        self._seconds[context, num_rows, num_drafts].append(seconds)

    def table(self, nums_drafts: Sequence[int]) -> list[dict[str, Any]]:
        """Of steps whose rows all had one of these numbers of draft tokens: the median, sorted."""
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


def _random_prompts(engine: Any, number: int, num_tokens: int) -> list[list[int]]:
    vocab_size = engine.vllm_config.model_config.get_vocab_size()
    return np.random.default_rng(num_tokens).integers(0, vocab_size, (number, num_tokens)).tolist()
