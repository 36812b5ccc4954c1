"""What the host takes of an engine's step: the plan, its requests, and the methods beside each other.

Knows neither torch nor vLLM: `host_worker` runs a method in a process of its own, on `host_device`.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.config import ConfigError
from rollout_spec.environment import environment
from rollout_spec.predict.step_times import StepTimes, Times
from rollout_spec.report.measures import paired
from rollout_spec.report.runs import for_json, ratio
from rollout_spec.trace import Rollout
from rollout_spec_lab.bench.engine import Method, take_turns
from rollout_spec_lab.bench.jobs import EngineJob, answers, last
from rollout_spec_lab.bench.load import one_rollout
from rollout_spec_lab.roofline.model import Model
from rollout_spec_lab.roofline.roofline import DEVICES, Roofline

WORKER = "rollout_spec_lab.bench.host_worker"
ON_MRV1 = "/mrv1"  # after a method: on MRV1
SYNC = "off:sync"  # plain vLLM that schedules step by step
VOCAB_SIZE = 151_936  # Qwen2.5's and Qwen3's, at least
MAX_NUM_BATCHED_TOKENS = 8192  # vLLM's own on a GPU of 80 GB
KV_BYTES = 2 * 2 * 64 * 2  # of a token, see make_model: keys and values, layers, width, bfloat16
# So many tokens a row and step are at hand: no method gives as many, and the batch stays full.
_SPARE = 4
_SHIFT = 7919  # of the token ids from one copy of the recording to the next

Request = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]  # prompt and response


@dataclasses.dataclass(frozen=True)
class Cell:
    """So many rows decode on a device whose steps take what `step` says."""

    rows: int
    step: str | tuple[str, str, int]  # for `StepTimes.parse`, or a `Roofline`: config.json, device, --tp
    name: str

    def times(self) -> Times:
        if isinstance(self.step, str):
            return StepTimes.parse(self.step)
        config, device, tensor_parallel = self.step
        return Roofline(Model.read(Path(config)), DEVICES[device], tensor_parallel)


def split(label: str) -> tuple[str, bool]:
    """A label's method, and whether it has MRV2: as on a GPU, unless the label says MRV1."""
    name = label.removesuffix(ON_MRV1)
    if name != SYNC and Method(name).label == "keyed":
        raise ConfigError(f"method {label!r}: bench host times {SYNC} in its place")
    if name.endswith("/mrv2"):
        raise ConfigError(f"method {label!r}: must be METHOD or METHOD/mrv1 in bench host")
    return name, name == label and name not in ("suffix", "ngram")


def drafting(label: str) -> str:
    """What `bench engine` calls a label's method."""
    name, _ = split(label)
    return "off" if name == SYNC else name


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """What is measured: every method in every cell, `repeats` times."""

    trace: Path
    limit_groups: int | None
    methods: Sequence[str]  # the others are compared with the first
    cells: Sequence[Cell]
    spec: Mapping[str, Any]
    num_speculative_tokens: int | None  # None: each method's default
    warm_up_steps: int
    steps: int | None  # None: the rollout from its first step to its last
    max_tokens: int | None  # no response is longer; None: whole ones
    repeats: int

    def job(self, method: str, model: str, longest: int, vocab_size: int) -> dict[str, Any]:
        """What `host_worker.run` takes; `longest`: tokens of a prompt and its response."""
        rows = max(cell.rows for cell in self.cells)
        engine: dict[str, Any] = {
            "load_format": "dummy", "enforce_eager": True, "max_num_seqs": rows, "max_model_len": longest,
            "max_num_batched_tokens": max(MAX_NUM_BATCHED_TOKENS, longest), "block_size": 32,
            "kv_cache_memory_bytes": rows * (longest + 64) * KV_BYTES,
        }  # fmt: skip
        method, on_mrv2 = split(method)
        if method == SYNC:
            method, engine["async_scheduling"] = "off", False
        elif on_mrv2:
            engine["async_scheduling"] = True  # which the drafter does not ask for by itself on CPUs
        job = EngineJob(
            model=model, dtype="bfloat16", method=method, engine=engine, spec=self.spec,
            num_speculative_tokens=self.num_speculative_tokens,
        )  # fmt: skip
        own = {"engine_job": job, "on_mrv2": on_mrv2, "trace": str(self.trace), "vocab_size": vocab_size}
        return dataclasses.asdict(self) | own


def cell_requests(
    lines: Sequence[Rollout], number: int, rows: int, num_steps: int | None, max_tokens: int | None,
    vocab_size: int,
) -> list[Request]:  # fmt: skip
    """Requests for a cell, more than its rows take in `num_steps`; None: `one_rollout`, as it is.

    Siblings are next to each other. The recording begins again where it ends. Each time and in each cell, it
    has tokens of its own, so nothing is known of them from before.
    """
    if num_steps is None:
        lines = one_rollout(lines, rows)
    found: list[Request] = []
    num_tokens, copy = 0, 1000 * number
    wanted = 1 if num_steps is None else rows * (num_steps * _SPARE + (max_tokens or 0))
    while num_tokens < wanted:
        for line in lines:
            for response in line.responses:
                prompt, tokens = (
                    ((text + np.int64(copy * _SHIFT)) % vocab_size).astype(np.int32)
                    for text in (line.prompt_token_ids, response[:max_tokens])
                )
                found.append((prompt, tokens))
                num_tokens += len(tokens)
        copy += 1
    return found


def make_model(folder: Path, vocab_size: int, max_model_len: int) -> None:
    """A model of two layers that nobody runs: vLLM makes up its weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab_size,
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": max_model_len,
        "tie_word_embeddings": True, "dtype": "bfloat16", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def time_methods(
    plan: HostPlan, lines: Sequence[Rollout], folder: Path,
    tracked: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Iterator[dict[str, list[dict[str, Any]]]]:  # fmt: skip
    """Every method once a repeat, each time another one first; after each repeat, what there is so far."""
    texts = [text for line in lines for text in (line.prompt_token_ids, *line.responses)]
    vocab_size = max(VOCAB_SIZE, 2 + max(int(text.max()) for text in texts))
    longest = max(
        len(line.prompt_token_ids) + len(response[: plan.max_tokens])
        for line in lines
        for response in line.responses
    )
    with tempfile.TemporaryDirectory(prefix="rollout_spec_") as model:
        make_model(Path(model), vocab_size, longest)

        def serve(_: int, method: str) -> dict[str, Any]:
            job = plan.job(method, model, longest, vocab_size)
            runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(job["on_mrv2"]))}
            return last(answers(WORKER, job, method, folder, environment=runner))

        yield from take_turns(plan.methods, plan.repeats, serve, tracked)


def make_record(plan: HostPlan, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What `rollout-spec-lab bench host --json` prints."""
    first = found[plan.methods[0]]
    return {
        "environment": environment(),
        "engines": {method: found[method][0]["settings"] for method in plan.methods},
        "plan": dataclasses.asdict(plan) | {"trace": plan.trace.name, "repeats": len(first)},
        "results": [
            {"rows": cell.rows, "step": cell.name, "method": method}
            | _figures(*([each["cells"][i] for each in runs] for runs in (first, found[method])))
            for i, cell in enumerate(plan.cells)
            for method in plan.methods
        ],
    }


def _figures(first: Sequence[Mapping[str, float]], mine: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The figures of one method and cell; `mine`: its repeats; `first`: those of the method that it is
    compared with."""

    def per(amount: str, of: str) -> float:
        return ratio(*(sum(run[name] for run in mine) for name in (amount, of)))

    def amounts(runs: Sequence[Mapping[str, float]], amount: str) -> npt.NDArray[np.float64]:
        return np.array([[run[name] for run in runs] for name in (amount, "seconds")], float)

    host_s, drafter_s = per("host_s", "num_steps"), per("drafter_s", "num_steps")
    return {
        "steps_per_s": per("num_steps", "seconds"),
        "tokens_per_s": per("num_tokens", "seconds"),
        "ratios": {
            f"{name}_per_s": paired(amounts(first, f"num_{name}"), amounts(mine, f"num_{name}"))[2].to_dict()
            for name in ("steps", "tokens")
        },
        "vllm_ms": 1e3 * (host_s - drafter_s),
        "drafter_ms": 1e3 * drafter_s,
        "draft_tokens_per_step": per("num_draft_tokens", "num_steps"),
        "acceptance_rate": for_json(per("num_accepted_tokens", "num_draft_tokens")),
        "repeats": [dict(run) for run in mine],
    }
