"""Launch scripts of checkouts that are given: with `+rollout.spec=sam` each starts, or a page says why not.

`make test-long UNI_AGENT=DIR`, and EXAMPLES="DIR ..." for folders with scripts of verl and verl-recipe.
Programs that a script calls only write down what they are called with.
"""

import os
import subprocess
from pathlib import Path

import pytest
import verl  # noqa: F401 - loads the plugin, which puts our groups on Hydra's search path
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import HydraException

from rollout_spec.config import ConfigError
from rollout_spec.verl.check_config import check_config

PROGRAMS = (
    *("ray", "uv", "python", "python3", "pip", "pip3", "curl", "wget", "hf", "huggingface-cli", "nvidia-smi"),
    *("npu-smi", "sleep", "sudo", "kill", "pkill", "mkdir", "tee", "docker", "git", "apt-get", "nohup", "rm"),
)
FOLDERS = filter(None, (os.environ.get("UNI_AGENT"), *os.environ.get("EXAMPLES", "").split()))
FOUND = (script for folder in FOLDERS for script in Path(folder).rglob("*.sh"))
SCRIPTS = sorted(script for script in FOUND if "verl.trainer.main_ppo" in script.read_text())
# Reasons, and where they are told.
PAGES = {
    "rollout.spec needs vLLM": "compatibility.md",
    "V1 trainer only": "getting-started/verl.md",
    "must be 1 with rollout.spec": "compatibility.md",
    "disaggregated prefill": "compatibility.md",
    "recurrent": "uses/recurrent.md",
}

pytestmark = [pytest.mark.long, pytest.mark.skipif(not SCRIPTS, reason="no UNI_AGENT, no EXAMPLES")]


def launched(script, folder):
    programs, called = folder / "bin", folder / "called"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" "" >> {called}\n')
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder)}
    env |= {"DATA_DIR": "/data", "RUNTIME_DIR": str(folder)}
    subprocess.run(["bash", script], env=env, cwd=script.parent, timeout=60, check=False, capture_output=True)
    text = called.read_text() if called.exists() else ""
    calls = [call.splitlines() for call in text.split("\n\n") if "\nverl.trainer.main_ppo\n" in call]
    if not calls:
        pytest.skip("it does not come to the trainer without its data, its model or another program")
    return calls[-1][calls[-1].index("verl.trainer.main_ppo") + 1 :]


def composed(arguments, *more):
    given = dict(each.split("=", 1) for each in arguments if each.startswith("--config-"))
    name = given.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    path = os.path.abspath(given["--config-path"]) if "--config-path" in given else None
    overrides = [each for each in arguments if "=" in each and not each.startswith("-")]
    start = initialize_config_dir if path else initialize_config_module
    with start(path or "verl.trainer.config", "main_ppo", version_base=None):
        return compose(name, [*overrides, *more])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_starts_or_a_page_says_why_not(script, tmp_path, monkeypatch):
    monkeypatch.chdir(script.parent)  # a path of configurations may begin there
    arguments = launched(script, tmp_path)
    try:
        config = composed(arguments, "+rollout.spec=sam")
    except HydraException as error:
        with pytest.raises(HydraException):
            composed(arguments)
        pytest.skip(f"this verl does not compose it: {str(error).splitlines()[0]}")
    said = "starts"
    try:
        check_config(config)
    except ConfigError as error:
        said = str(error)
    assert said == "starts" or any(reason in said for reason in PAGES), said
    print(f"{script.name}: {said}")
