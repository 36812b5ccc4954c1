"""Short trainings of tiny random policies: for what verl does with them, not for what they say."""

from __future__ import annotations

import io
import json
import pathlib
import sys

from rollout_spec_lab.demo.data import make_data
from rollout_spec_lab.demo.model import make_model
from rollout_spec_lab.demo.runner import METRICS_FILE
from tests.test_training import execute
from tests.tiny_vl import make_image

NUM_PROMPTS = 2  # of a batch
NUM_SAMPLES = 4
LENGTH = 64
NUM_STEPS = 2
TOOLS = pathlib.Path(__file__).with_name("tools.py")


def make_policy(folder: pathlib.Path) -> pathlib.Path:
    """Two layers, with the tokenizer of the demo's; one token is much likelier than the others, as with a
    trained policy, so that it soon repeats itself."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(
        make_model(pathlib.Path(".cache/models/smollm2-float32"), "float32")
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(24)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_image_data(folder: pathlib.Path) -> pathlib.Path:
    """Two prompts of different length with an image each, as a parquet file of verl's."""
    import pandas

    rows = []
    for number in range(NUM_PROMPTS):
        png = io.BytesIO()
        make_image(number).save(png, "PNG")
        rows.append(
            {
                "data_source": "images",
                "prompt": [{"role": "user", "content": "<image>What is this" + number * "?"}],
                "images": [{"bytes": png.getvalue()}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": number},
            }
        )
    file = folder / "images.parquet"
    pandas.DataFrame(rows).to_parquet(file, index=False)
    return file


def train(
    folder: pathlib.Path, model: pathlib.Path, *overrides: str, method: str = "sam"
) -> list[dict[str, float]]:
    """The metrics of each step of a GRPO training, which the overrides may make another one."""
    train_file, val_file = make_data(folder, num_train=2 * NUM_PROMPTS, num_val=NUM_PROMPTS)
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo",
        "+rollout_spec_demo=[cpu,grpo]",
        f"+rollout.spec={method}",
        "rollout.spec.batch_threshold=64",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.logger=[console,file]",
        f"data.max_response_length={LENGTH}",
        f"data.train_files={train_file}",
        f"data.val_files={val_file}",
        f"actor_rollout_ref.model.path={model.absolute()}",
        f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=134217728",
        f"reward.custom_reward_function.path={TOOLS}",
        f"hydra.run.dir={folder}/hydra",
        *overrides,
    ]  # fmt: skip
    execute(command, folder, "train.log")
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    steps: dict[int, dict[str, float]] = {}
    for line in lines:
        steps.setdefault(line["step"], {}).update(line["data"])
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        if method == "sam":
            assert metrics["rollout/spec_num_failed_steps"] == 0
            assert metrics["rollout/spec_num_accepted_tokens"] > 0
    return [steps[step] for step in sorted(steps)]
