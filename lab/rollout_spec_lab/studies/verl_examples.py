"""verl's own example scripts with `+rollout.spec=sam`: do they compose, and what do our checks say?

    python lab/rollout_spec_lab/studies/verl_examples.py CHECKOUT [--all] [--recipes CHECKOUT] [--vllm 0.29.0]

CHECKOUT is the verl that is installed. Every script under its `examples/` runs in a copy, with a stub for
whatever launches or downloads: it notes its arguments and does nothing. A script that knows `INFER_BACKEND`
or `DEVICE` also runs with sglang, and for NPUs. What a stub was called with is composed as verl's entry point
does it, and made into verl's own classes, first as it is and then with our option and our check. Nothing is
launched. With a checkout of verl-recipe: the same for its scripts that launch DAPO's trainer.

The policies' files are not at hand. What our check reads of Qwen3.5's, Qwen3-Next's and Nemotron's is here.
`--vllm` checks these as if that release was installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl  # loads the plugin, which puts our groups on Hydra's search path
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import PretrainedConfig
from verl.utils.config import omega_conf_to_dataclass

from rollout_spec.verl import recurrent_policy
from rollout_spec.verl.check_config import CheckConfig

VARIANTS: tuple[dict[str, str], ...] = ({}, {"INFER_BACKEND": "sglang"}, {"DEVICE": "npu"})
STUBBED = (
    "python", "python3", "torchrun", "uv", "ray", "accelerate", "pip", "pip3", "git", "wget", "curl", "hf",
    "huggingface-cli", "nvidia-smi", "npu-smi", "nsys",
)  # fmt: skip
# `python -c` asks what is installed, and may.
STUB = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
{python} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >> {notes}
"""
# What some scripts ask the user for, and a limit that not every shell may raise.
GIVEN = {
    **dict.fromkeys(("LORA_ADAPTER_PATH", "DATA_ROOT", "HDFS_ROOT", "RAY_DATA_HOME"), "given"),
    "BASH_FUNC_ulimit%%": "() { :; }",
}
# Of a config.json, by what the policy's name has.
POLICIES: dict[str, dict[str, Any]] = {
    "qwen3.5": {"architectures": ["Qwen3_5MoeForConditionalGeneration"],
                "text_config": {"linear_num_value_heads": 32, "linear_num_key_heads": 16,
                                "linear_value_head_dim": 128, "linear_key_head_dim": 128,
                                "num_hidden_layers": 40, "full_attention_interval": 4}},
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 32,
                   "linear_num_key_heads": 16, "linear_value_head_dim": 128, "linear_key_head_dim": 128,
                   "num_hidden_layers": 48, "full_attention_interval": 4},
    "nemotron": {"architectures": ["NemotronHForCausalLM"], "ssm_state_size": 128, "mamba_num_heads": 64,
                 "mamba_head_dim": 64, "n_groups": 8, "hybrid_override_pattern": "MEM*" * 13},
}  # fmt: skip
MAIN, DAPO = "verl.trainer.main_ppo", "recipe.dapo.main_dapo"
OPTION = "+rollout.spec=sam"
PASSES = "passes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--all", action="store_true", help="name every launch, not only the counts")
    parser.add_argument("--recipes", type=Path, help="a checkout of verl-recipe, whose scripts run")
    parser.add_argument("--vllm", help="check policies with recurrent layers as if it was installed")
    arguments = parser.parse_args()
    PretrainedConfig.get_config_dict = classmethod(fields_of)  # type: ignore[arg-type]
    if arguments.vllm:
        recurrent_policy.version = lambda: arguments.vllm  # type: ignore[attr-defined]
    if not (arguments.checkout / "examples").is_dir():
        parser.error(f"{arguments.checkout}: no checkout of verl (no examples/)")
    counts: Counter[str] = Counter()
    for name, call in launches(arguments.checkout.resolve(), arguments.recipes):
        outcome = outcome_of(call, arguments.recipes)
        counts[outcome] += 1
        if arguments.all:
            print(f"{name}: {outcome}", flush=True)
    print(f"| launches | of verl {verl.__version__} with `{OPTION}` |\n|---|---|")
    for outcome, count in counts.most_common():
        print(f"| {count} | {outcome} |")


def fields_of(_: Any, path: str, **__: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a policy's config.json; an OSError where we have none, as without a hub."""
    name = str(path).lower().replace("qwen3_5", "qwen3.5").replace("qwen3_next", "qwen3-next")
    for part, fields in POLICIES.items():
        if part in name:
            return fields, {}
    raise OSError(f"{path}: not at hand")


def launches(checkout: Path, recipes: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """A name of each call of a launcher, and its arguments; of recipes, those of DAPO."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "verl"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"), symlinks=True)
        scripts = sorted(copy.glob("examples/**/*.sh"))
        if recipes is not None:
            shutil.copytree(recipes, copy / "recipe", dirs_exist_ok=True)
            scripts = [each for each in sorted(copy.glob("recipe/**/*.sh")) if DAPO in each.read_text()]
        for script in scripts:
            for variant in VARIANTS if recipes is None else VARIANTS[:1]:
                if all(name in script.read_text() for name in variant):
                    words = [
                        str(script.relative_to(copy)),
                        *(f"{key}={value}" for key, value in variant.items()),
                    ]
                    for call in calls_of(script, copy, Path(folder), variant):
                        yield " ".join(words), call


def calls_of(script: Path, copy: Path, folder: Path, variant: dict[str, str]) -> list[list[str]]:
    """The arguments with which a script calls modules; those of one empty call where it calls none."""
    stubs, notes = folder / "bin", folder / "notes"
    stubs.mkdir(exist_ok=True)
    notes.write_text("")
    for name in STUBBED:
        (stubs / name).write_text(STUB.format(python=sys.executable, notes=notes))
        (stubs / name).chmod(0o755)
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "HOME": str(folder), **GIVEN, **variant}
    environment["MODEL_PATH"] = f"given/{script.stem}"  # which names the policy
    subprocess.run(
        ["bash", str(script)], cwd=copy, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        timeout=120, check=False,
    )  # fmt: skip
    calls = map(json.loads, notes.read_text().splitlines())
    return [call for call in calls if "-m" in call] or [[]]


def outcome_of(call: list[str], recipes: Path | None = None) -> str:
    """What comes of a launch with our option, in words that are the same for the same reason."""
    module = call[call.index("-m") + 1] if "-m" in call else None
    if module not in (MAIN, DAPO):
        return f"no launch of `{MAIN}`: {module or 'no call of a module'}"
    overrides = call[call.index("-m") + 2 :]
    folder, name = Path(verl.__file__).parent / "trainer", "ppo_trainer"
    if module == DAPO:
        assert recipes is not None
        overrides.append(f"hydra.searchpath=[file://{folder}/config]")
        folder, name = recipes.resolve() / "dapo", "dapo_trainer"
        importlib.import_module("verl.trainer.main_ppo_v0")  # as the module does
    try:
        to_verls_classes(composed(overrides, folder, name))
    except Exception as error:
        return f"verl refuses it without us: {reason_of(error)}"
    said = io.StringIO()
    try:
        config = composed([*overrides, OPTION], folder, name)
        with contextlib.redirect_stderr(said):
            CheckConfig().on_run_start(config)
            CheckConfig().on_job_start(config)
        to_verls_classes(config)
    except SystemExit:
        key, _, reason = said.getvalue().splitlines()[-1].removeprefix("rollout_spec: ").partition(": ")
        return f"refused: `{key.split('.')[-1]}`: {reason}"
    except Exception as error:
        return f"fails with us alone: {reason_of(error)}"
    return PASSES


def composed(arguments: list[str], folder: Path, name: str) -> Any:
    """The configuration with these arguments, of a command in the folder that has this one by default."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--config-path", "-cp", default="config")
    parser.add_argument("--config-name", "-cn", default=name)
    options, overrides = parser.parse_known_args(arguments)
    with initialize_config_dir(str((folder / options.config_path).resolve()), version_base=None):
        return compose(options.config_name.removesuffix(".yaml"), overrides)


def to_verls_classes(config: Any) -> None:
    for section in ("actor_rollout_ref.rollout", "algorithm"):
        omega_conf_to_dataclass(OmegaConf.select(config, section))


def reason_of(error: Exception) -> str:
    """The first line of an error that says why."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Error in call to")]
    return lines[0]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
