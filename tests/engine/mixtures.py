"""Random requests: of all kinds beside each other."""

from typing import Any

from docs.request_options import SAMPLING
from rollout_spec.vllm.keys import GROUP_KEY, NAME_KEY
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.serving import REASONING, SERVED, Request, sampling

PROMPT = "<abcabcabcab"
NUM_MIXED = 70
CHARACTERS = [chr(i) for i in range(33, 123)]  # no braces, which stand for parts of a text in stop strings
FEW_CHARACTERS = "abcd!"  # of which texts have all the words of a few
MIXED = {option.name: option.examples for option, _ in SERVED.values() if option in SAMPLING}
# Log-probabilities are of what is sampled from.
MIXING: dict[str, Any] = {
    "scheduling_policy": "priority", "max_num_batched_tokens": 24, "max_logprobs": -1,
    "reasoning_config": REASONING, "logprobs_mode": "processed_logprobs",
}  # fmt: skip


def bad_words(draw):
    """Words of one to four tokens, the longer ones more often; "!" is always allowed."""
    return ["".join(draw.choices(FEW_CHARACTERS[:-1], k=length)) for length in (1, 2, 2, 3, 3, 3, 4, 4, 4)]


def random_request(draw):
    """A request with up to six options, each an example of the table or with values of its own.

    There are few prompts and keys: texts begin alike, and drafts come from them.
    """
    options: list[dict[str, Any]] = [
        {"stop": [*draw.choices(CHARACTERS, k=2), "".join(draw.choices(CHARACTERS, k=2))]},
        {"stop_token_ids": draw.sample(range(VOCAB_SIZE), 6)},
        {"min_tokens": draw.randint(1, 12)},
        {"frequency_penalty": -0.2},
        {"top_k": draw.randint(1, 20), "top_p": draw.uniform(0.3, 1.0)},
        {"bad_words": draw.choices(CHARACTERS, k=4)},
        {"allowed_token_ids": [*map(ord, FEW_CHARACTERS)], "bad_words": bad_words(draw)},
        {"allowed_token_ids": draw.sample(range(3, VOCAB_SIZE), 100)},
        {"structured_outputs": {"regex": draw.choice(["[a-z]+", "([0-9]{2}-){4,9}", "(ab|cd)+e"])}},
        {"extra_args": {NAME_KEY: "grouped", GROUP_KEY: draw.choice(["a", "b"])}},
        {"seed": draw.randrange(4), "extra_args": None},
    ]
    options += map(draw.choice, MIXED.values())
    asked: dict[str, Any] = {
        "extra_args": {NAME_KEY: ["mixed", draw.randrange(4)]}, "temperature": draw.choice([0.0, 0.7, 1.0]),
        "max_tokens": draw.randint(1, 40), "ignore_eos": draw.random() < 0.8,
    }  # fmt: skip
    for option in draw.sample(options, draw.randint(0, 6)):
        asked |= option
    if "structured_outputs" in asked:  # together they may allow nothing
        for name in ("allowed_token_ids", "bad_words", "thinking_token_budget"):
            asked.pop(name, None)
        asked["ignore_eos"] = False
    if "n" in asked:  # vLLM refuses several greedy samples
        asked["temperature"] = asked["temperature"] or 1.0
    if not asked.get("detokenize", True):
        asked.pop("stop", None)
    asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
    text = "".join(draw.choices(CHARACTERS, k=28))
    prompt = draw.choice([PROMPT, "123123", "hello"])
    return Request(prompt, sampling(asked, text), {"priority": draw.randrange(3)})
