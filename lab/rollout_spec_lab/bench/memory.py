"""What a budget buys: a training by epochs, simulated, with less and less memory for its texts.

Samples say what they said in the epoch before, but for the tokens that have drifted. The text is synthetic:
words of a fixed vocabulary. `simulate` serves it, and has engines exchange their texts after every step.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.native import Int32Array
from rollout_spec.environment import environment
from rollout_spec.predict.engine import Cluster
from rollout_spec.predict.load import Request
from rollout_spec.predict.simulate import simulate
from rollout_spec.predict.step_times import StepTimes
from rollout_spec.trace import Rollout

SHARES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
BYTES_PER_TOKEN = 70
PROMPTS_OF_A_STEP = 4


@dataclasses.dataclass(frozen=True)
class Training:
    num_prompts: int = 96
    num_samples: int = 4
    num_tokens: int = 600  # of the longest response
    num_epochs: int = 4
    num_engines: int = 1
    history: int = 8
    drift: float = 0.1  # share of tokens that are others in the next epoch
    shuffled: bool = False  # prompts come in another order in every epoch
    num_turns: int = 1  # of a sample, each an equal part of its response
    rewrites: bool = False  # the template does, as `rewritten`

    @property
    def index_bytes(self) -> int:
        """Of all texts that are kept, about, if they were all indexed in one engine."""
        mean = 0.75 * self.num_tokens
        return int(self.num_prompts * max(self.history, self.num_samples) * mean * BYTES_PER_TOKEN)


def words(rng: np.random.Generator, num_tokens: int) -> Int32Array:
    vocabulary = np.random.default_rng(5).integers(0, 3000, (4000, 6), dtype=np.int32)
    chosen = vocabulary[np.minimum(rng.zipf(1.2, num_tokens // 6 + 1), len(vocabulary)) - 1]
    return chosen.reshape(-1)[:num_tokens]


def lines_of(training: Training) -> Iterator[Rollout]:
    """A line for each prompt of each epoch; those of a training step come together."""
    rng = np.random.default_rng(0)
    prompts = [words(rng, 50) for _ in range(training.num_prompts)]
    texts = [[words(rng, training.num_tokens) for _ in range(training.num_samples)] for _ in prompts]
    for epoch in range(training.num_epochs):
        order = rng.permutation(len(prompts)) if training.shuffled else np.arange(len(prompts))
        for place, number in enumerate(order.tolist()):
            responses = []
            for text in texts[number]:
                drifted = rng.random(len(text)) < training.drift
                text[drifted] = words(rng, len(text))[drifted]
                responses.append(text[: int(len(text) * rng.uniform(0.5, 1.0))].copy())
            step = epoch * len(prompts) + place // PROMPTS_OF_A_STEP
            parts = (np.linspace(0, len(each), training.num_turns + 1).astype(np.int32) for each in responses)
            turns = [np.column_stack((part[:-1], part[1:])) for part in parts]
            yield Rollout(str(number), step, prompts[number], responses, turns=turns)


def rewritten(request: Request, prompt: Int32Array | None = None) -> Request:
    """With this prompt; a later turn's has the last quarter of each turn before, the rest was reasoning."""
    prompt = request.prompt_token_ids if prompt is None else prompt
    answer = request.response[len(request.response) * 3 // 4 :]
    later = request.next_turn and rewritten(request.next_turn, np.append(prompt, answer))
    return dataclasses.replace(request, prompt_token_ids=prompt, num_cached=0, next_turn=later)


def simulate_budgets(training: Training, shares: Sequence[float] = SHARES) -> dict[str, Any]:
    """Tokens per step with each share of `index_bytes` as the budget, and with memory to spare."""
    lines = list(lines_of(training))
    rows = PROMPTS_OF_A_STEP * training.num_samples
    cluster = Cluster(training.num_engines, rows)
    results = []
    for share in (*shares, None):
        mib = 1 << 12 if share is None else max(1, round(share * training.index_bytes / 2**20))
        config = SpecConfig(history=training.history, batch_threshold=rows, max_index_mb=mib)
        times = StepTimes([(1, 0.01, 1.0)])
        figures = simulate(lines, cluster, config, times, template=rewritten if training.rewrites else None)
        results.append({"share": share, "max_index_mb": mib, "tokens_per_step": figures["tokens_per_step"]})
    for result in results:
        result["of_unlimited"] = result["tokens_per_step"] / results[-1]["tokens_per_step"]
    return {"environment": environment(), "training": dataclasses.asdict(training), "results": results}
