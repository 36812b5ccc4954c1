"""What `bench engine` and `gpu-check` measure of MRV2; as `tests.engine.interpreted_runner`."""

from dataclasses import asdict
from typing import Any

from rollout_spec_lab.bench.jobs import EngineJob
from tests.engine.conftest import engine_settings

REQUESTS = [{"prompt": i // 2, "max_tokens": 24, "name": [0, i]} for i in range(4)]
PROMPTS = [[1, *[5, 9] * 14, 7 + i] for i in range(2)]
# Responses of a recording: they repeat, also each other, and err.
RECORDED = [
    [*range(10 + i, 20), *range(30, 36), *range(10, 20), 40 + i, *range(30, 50)][:44] for i in range(4)
]


def job_of(model: str, method: str, load: dict[str, Any], **engine: Any) -> EngineJob:
    settings = engine_settings(model) | {"max_model_len": 256, "max_num_seqs": 4, **engine}
    for name in ("model", "dtype", "seed", "skip_tokenizer_init", "disable_log_stats"):
        del settings[name]
    spec = {"num_speculative_tokens": 4, "history": 0}
    return EngineJob(model=model, dtype="float32", method=method, engine=settings, spec=spec, **load)


def recorded_load() -> dict[str, Any]:
    from rollout_spec_lab.bench.load import Load

    load = Load(PROMPTS[:1], recorded=[RECORDED])
    return {"prompts": load.prompts, "requests": load.requests(0), "temperature": 1.0, "recorded": RECORDED}


def main(model: str) -> dict[str, Any]:
    from rollout_spec_lab.bench import engine_worker
    from rollout_spec_lab.gpu_check import steps as check_steps

    cuts = {num: nums_kept(num) for num in (7, 8)}  # before an engine lets the process cut all rows alike
    load = {"prompts": PROMPTS, "requests": REQUESTS, "temperature": 0.3}
    ahead, in_turn = {"async_scheduling": True}, {"async_scheduling": False}
    methods = "keyed", "sam:0", "sam:64"
    result = {method: engine_worker.run(job_of(model, method, load, **ahead)) for method in methods}
    # Else the first steps are ahead of the drafter.
    result["recorded"] = engine_worker.run(job_of(model, "sam:64", recorded_load(), **in_turn))
    steps = {"contexts": [16], "nums_rows": [1, 2], "nums_drafts": [0, 2], "num_steps": 2}
    job = {"engine_job": asdict(job_of(model, "sam:0", {}, **ahead)), "deadline": float("inf")}
    *_, result["steps"] = check_steps.run(job | steps)
    return result | {"cuts": cuts}


def nums_kept(num_rows: int) -> dict[str, list[int]]:
    """By each way of `bench verify` to take the 20 likeliest tokens, how many it keeps of each row."""
    import torch

    from rollout_spec_lab.bench.verify import Step, cuts

    step = Step(num_rows, 0, 1000, torch.device("cpu"))
    ways = cuts("cuda").items()
    return {name: step.cut(way, "top-k").isfinite().sum(dim=-1).tolist() for name, way in ways}
