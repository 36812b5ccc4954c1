"""One rollout in a fresh engine and process: `python -m rollout_spec_lab.bench.engine_worker JOB RESULT`.

Every method is watched in the same way: by vLLM's own statistics of a step, one clock, and a clock around
its drafter.
"""

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from rollout_spec.certify.certify import drafting_arguments
from rollout_spec.config import SpecConfig
from rollout_spec.metrics import EngineCounters
from rollout_spec.vllm import OPTIONS_KEY
from rollout_spec.vllm.keys import NAME_KEY
from rollout_spec.vllm.proposing.proposer import proposer_of
from rollout_spec.vllm.refusals.checks import mrv2_misfit
from rollout_spec_lab.bench.cpu_rejection import mend_cpu_rejection
from rollout_spec_lab.bench.engine import Method
from rollout_spec_lab.bench.forget import forget_all
from rollout_spec_lab.bench.jobs import EngineError, EngineJob, reply
from rollout_spec_lab.bench.load import random_prompts
from rollout_spec_lab.bench.recorded import Recorded
from rollout_spec_lab.bench.stopwatch import Stopwatch
from rollout_spec_lab.bench.timeline import Timeline

# vLLM asks for all three and has a default for none. 8 draft tokens, as in earlier records: what sam drafts
# by default is no measure for ngram, which drafts that many in every step.
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 8}
WARM_UP_TOKENS = 8


class Watch:
    """The engine's only statistics logger, and the clock around its drafter."""

    def __init__(self, engine: Any) -> None:
        runner = runner_of(engine)
        self._ours, self.drafting = proposer_of(runner), Stopwatch(time.thread_time)
        if (drafter := self._ours or getattr(runner, "drafter", None)) is not None:
            self.drafting.time(drafter, "draft" if self._ours else "propose")  # what both runners call
        # In place of vLLM's own loggers, which cost a step as much as a small model does.
        engine.logger_manager.stat_loggers[:] = [self]
        self.start()

    def start(self) -> None:
        self.counters()
        self.timeline = Timeline()
        self.drafting.seconds = 0.0
        self._last = time.perf_counter()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """vLLM's StatLoggerBase: once for each step that gave a token."""
        if iteration_stats is None:
            return  # scheduled ahead, and nothing has come back
        now = time.perf_counter()
        drafts = scheduler_stats.spec_decoding_stats
        self.timeline.add(
            seconds=now - self._last,
            num_running=scheduler_stats.num_running_reqs + len(iteration_stats.finished_requests),
            num_rows=len(iteration_stats.inter_token_latencies_iter),
            num_tokens=iteration_stats.num_generation_tokens,
            num_prefills=len(iteration_stats.time_to_first_tokens_iter),
            num_draft_tokens=drafts.num_draft_tokens if drafts else 0,
            num_accepted_tokens=drafts.num_accepted_tokens if drafts else 0,
        )
        self._last = now

    def log(self) -> None:
        """vLLM asks every few seconds."""

    def counters(self) -> EngineCounters:
        """Our drafter's counters since the last call; zeros where there is another or none."""
        return self._ours.take_counters() if self._ours else EngineCounters()


def run(job: EngineJob) -> dict[str, Any]:
    """Serve a job: what `rollout` gives, and the settings that the engine has."""
    engine = make_engine(job)
    recorded = Recorded(runner_of(engine)) if job.recorded else None
    watch = Watch(engine)
    warm_up(engine)
    return rollout(engine, watch, job, recorded) | {"settings": settings_of(engine.vllm_config)}


def rollout(engine: Any, watch: Watch, job: EngineJob, recorded: Recorded | None = None) -> dict[str, Any]:
    """Of a job's requests: timeline, responses, CPU seconds of the drafter, our drafter's counters."""
    prompts, params = _requests(job)
    if recorded:
        recorded.start(job.recorded)
    watch.start()
    responses = serve(engine, prompts, params)
    if recorded and responses != job.recorded:
        raise EngineError("a request did not get its recorded tokens")
    return {
        "timeline": dataclasses.asdict(watch.timeline),
        "draft_cpu_s": watch.drafting.seconds,
        "counters": watch.counters().to_dict(),
        "responses": responses,
    }


def runner_of(engine: Any) -> Any:
    """Its model runner; the engine is in this process."""
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def make_engine(job: EngineJob) -> Any:
    """vLLM's engine, in this process, of a job's model and method."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    mend_cpu_rejection()  # by which `ngram` and `suffix` are verified
    if Method(job.method).drafting == "keyed" and mrv2_misfit() is not None:
        # Else vLLM's own choice, which can be MRV2 where nothing drafts.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=job.model, dtype=job.dtype, seed=job.seed,
            skip_tokenizer_init=not job.natural_ends, **job.engine, **_method_arguments(job),
        )
    )  # fmt: skip


def _method_arguments(job: EngineJob) -> dict[str, Any]:
    method = Method(job.method)
    coupled = {"additional_config": {OPTIONS_KEY: {"method": "keyed"}}}
    if method.name in ("off", "keyed"):
        return {} if method.name == "off" else coupled
    if method.name == "model":
        return coupled | {"speculative_config": dict(job.model_drafter or {})}
    if method.is_ours:
        return drafting_arguments(method.options(job.spec), job.model_drafter if method.has_model else None)
    speculative: dict[str, Any] = {"method": method.name} | (NGRAM if method.name == "ngram" else {})
    if job.num_speculative_tokens is not None:  # else vLLM's default for `suffix`
        speculative["num_speculative_tokens"] = job.num_speculative_tokens
    return {"speculative_config": speculative}


def _requests(job: EngineJob) -> tuple[list[Sequence[int]], list[Any]]:
    params = [
        SamplingParams(
            temperature=job.temperature, max_tokens=request["max_tokens"], detokenize=False,
            ignore_eos=not job.natural_ends, extra_args={NAME_KEY: request["name"]},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in job.requests
    ]  # fmt: skip
    return [job.prompts[request["prompt"]] for request in job.requests], params


def warm_up(engine: Any) -> None:
    """A full batch of random prompts, so that every code path has run once; our drafter forgets it again."""
    scheduler, model = engine.vllm_config.scheduler_config, engine.vllm_config.model_config
    prompts = random_prompts(scheduler.max_num_seqs, model.get_vocab_size(), model.seed, 2 * WARM_UP_TOKENS)
    params = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True, detokenize=False)
    serve(engine, prompts, [params] * len(prompts))
    if proposer := proposer_of(runner_of(engine)):
        forget_all(proposer)


def serve(engine: Any, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[list[int]]:
    """Serve requests; the responses, in their order."""
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, param)
    responses: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                responses[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [responses[i] for i in range(len(prompts))]


def settings_of(config: Any) -> dict[str, Any]:
    """What an engine really runs with; `config` is vLLM's."""
    speculative = config.speculative_config
    spec = SpecConfig.from_mapping((config.additional_config or {}).get(OPTIONS_KEY, {"method": "off"}))
    return {
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else 0,
        "device": current_platform.get_device_name(),
        "cuda_graphs": config.compilation_config.cudagraph_mode.name,
        "model_runner": "MRV2" if config.use_v2_model_runner else "MRV1",
        "async_scheduling": config.scheduler_config.async_scheduling,
        "enforce_eager": config.model_config.enforce_eager,
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        # Defaults too: a record must not change its meaning when defaults move.
        "options": spec.to_dict() if spec.enabled else None,
    }


if __name__ == "__main__":
    reply(lambda job: run(EngineJob(**job)))
