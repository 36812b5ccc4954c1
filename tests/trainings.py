"""Short trainings with verl's own command, on two prompts a batch; what they log and record."""

import io
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple

import pandas
from transformers import AutoTokenizer

from rollout_spec import trace
from rollout_spec.drafting.history import group_key
from rollout_spec.drafting.history_pieces import read_file
from rollout_spec.trace import read_trace
from rollout_spec.verl.trainer_history import FILE
from rollout_spec_lab.demo.data import make_data
from rollout_spec_lab.demo.model import make_model
from rollout_spec_lab.demo.runner import METRICS_FILE, environment
from rollout_spec_lab.processes import started
from tests.engine.conftest import make_tiny
from tests.text import merged
from tests.tiny_vl import make_image

ROOT = pathlib.Path(__file__).parents[1]
NUM_PROMPTS = 2  # of a batch
NUM_SAMPLES = 4
LENGTH = 64
NUM_STEPS = 2
TOOLS = pathlib.Path(__file__).with_name("tools.py")
UNI_AGENT = os.environ.get("UNI_AGENT")  # a checkout, without its submodule of verl
MANAGERS = {
    "verls": None,
    "derived": "tests.gateways.Derived",
    "unknown": "tests.gateways.Gateways",
    "uni-agent": "uni_agent.framework.entry.AgentFrameworkRolloutAdapter",
}
GIVEN = [manager for manager in MANAGERS if manager != "uni-agent" or UNI_AGENT]


class Response(NamedTuple):
    """One that has ended: on which replica, and which version the weights had then."""

    replica: int
    version: int
    group: str
    name: list[Any]
    prompt: list[int]
    tokens: list[int]
    num_generated: int  # of them, by the policy

    @property
    def kind(self):
        return self.name[2]


class Run(NamedTuple):
    folder: pathlib.Path
    metrics: dict[int, dict[str, Any]]  # by training step
    responses: list[Response]
    last_steps: tuple[int, ...] = ()  # of each process

    def of_steps(self, metric):
        return [metrics.get(f"rollout/spec_{metric}", 0) for metrics in self.metrics.values()]

    def total(self, metric):
        return sum(self.of_steps(metric))

    def ended(self, kind):
        return [response for response in self.responses if response.kind == kind]

    def history(self, step):
        return merged(*read_file(self.folder / f"global_step_{step}" / FILE))

    def saved(self, step):
        history, groups = self.history(step), {response.group for response in self.responses}
        return {group: [text.tolist() for text in history.get(group_key(group))] for group in sorted(groups)}


def smollm2():
    return make_model(pathlib.Path(".cache/models/smollm2-float32"), "float32")


def command(
    folder, model, *overrides, method="sam", mode="sync", num_train=2 * NUM_PROMPTS, num_steps=NUM_STEPS,
    num_samples=NUM_SAMPLES,
):  # fmt: skip
    """verl's own command for a GRPO training, which the overrides may make another one."""
    train_file, val_file = make_data(folder, num_train=num_train, num_val=NUM_PROMPTS)
    groups = ["cpu", "grpo", *([] if mode == "sync" else [mode])]
    return [
        sys.executable, "-m", "verl.trainer.main_ppo",
        f"+rollout_spec_demo=[{','.join(groups)}]",
        f"+rollout.spec={method}",
        "rollout.spec.batch_threshold=64",
        f"trainer.total_training_steps={num_steps}",
        f"trainer.default_local_dir={folder}",
        f"actor_rollout_ref.rollout.n={num_samples}",
        f"data.max_response_length={LENGTH}",
        f"data.train_files={train_file}",
        f"data.val_files={val_file}",
        f"actor_rollout_ref.model.path={model.absolute()}",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=268435456",
        f"hydra.run.dir={folder}/hydra",
        *overrides,
    ]  # fmt: skip


def managed_by(manager, mode, folder):
    """The overrides for a training with one of MANAGERS."""
    options = []
    if MANAGERS[manager]:
        options = [f"++actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGERS[manager]}"]
    if manager == "uni-agent":
        framework = "++actor_rollout_ref.rollout.custom.agent_framework"
        options += [f"{framework}.{option}" for option in (
            "gateway_count=2",
            f"log_dir={folder}/uni_agent",
            "use_reward_loop_worker=false",
            "agent_runners.task.runner_fqn=tests.sessions.run",
            f"agent_runners.task.dispatch_mode={'ray_task' if mode == 'colocate_async' else 'inline_async'}",
        )]  # fmt: skip
    return options


def environment_of(folder):
    env = environment(folder, folder) | {"PYTHONPATH": f"{ROOT}:{folder}:{os.environ.get('PYTHONPATH', '')}"}
    for name in ("OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):
        env.pop(name, None)  # of this process; verl is to choose, as in a run of a user
    return env


def hook(folder, code, after):
    """What each process of a training calls once it has imported a module, `it`."""
    when = f"from rollout_spec.patches import when_imported\nwhen_imported({after!r}, lambda it: {code})\n"
    (folder / "sitecustomize.py").write_text(when)


def execute(training, folder, log="train.log"):
    with started(training, folder / log, environment_of(folder)) as process:
        code = process.wait(880)
    assert code == 0, (folder / log).read_text()[-20000:]
    steps: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, (folder / METRICS_FILE).read_text().splitlines()):
        steps.setdefault(line["step"], {}).update(line["data"])
    return dict(sorted(steps.items()))


def responses_of(folder):
    found = []
    for file in sorted((folder / trace.FOLDER).glob("rollouts-*.jsonl")):
        for line in read_trace(file):
            common = int(file.stem.split("-")[1]), line.step, line.group
            for name, own, num in zip(line.names, line.responses, line.num_generated, strict=True):
                found.append(Response(*common, name, line.prompt_token_ids.tolist(), own.tolist(), num))
    return found


def make_policy(folder):
    """Two layers, with the tokenizer of the demo's; one token is much likelier than the others, as with a
    trained policy, so that it soon repeats itself."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    own = {name: getattr(tokenizer, name) for name in names} | {"vocab_size": len(tokenizer)}
    make_tiny("Llama", folder, peak=24, max_position_embeddings=1024, tie_word_embeddings=False, **own)
    tokenizer.save_pretrained(folder)
    return folder


def make_image_data(folder):
    """Two prompts of different length with an image each, as a parquet file of verl's."""
    rows = []
    for number in range(NUM_PROMPTS):
        png = io.BytesIO()
        make_image(number).save(png, "PNG")
        asked = {"role": "user", "content": "<image>What is this" + number * "?"}
        reward = {"style": "rule", "ground_truth": ""}
        row = {"prompt": [asked], "images": [{"bytes": png.getvalue()}], "reward_model": reward}
        rows.append(row | {"data_source": "images", "extra_info": {"index": number}})
    file = folder / "images.parquet"
    pandas.DataFrame(rows).to_parquet(file, index=False)
    return file


def train(folder, model, *overrides, method="sam"):
    """The metrics of the steps of a training, each of which has a gradient, and accepted drafts with sam."""
    reward = f"reward.custom_reward_function.path={TOOLS}"
    steps = execute(command(folder, model, reward, *overrides, method=method), folder)
    assert [*steps] == list(range(1, NUM_STEPS + 1))
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        if method == "sam":
            assert metrics["rollout/spec_num_failed_steps"] == 0
            assert metrics["rollout/spec_num_accepted_tokens"] > 0
    return [*steps.values()]
