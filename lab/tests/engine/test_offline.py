"""The kit for a machine without network, from packing to its commands, with the vLLM that is here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_spec.trace import to_line
from rollout_spec_lab.gpu_check import PARTS

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_it_packs_unpacks_and_measures(tiny_model: str, tmp_path: Path) -> None:
    """As lab/offline/README.md has it, but for the machine, the model and the minutes."""
    site, out = tmp_path / "site", tmp_path / "out"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SITE": str(site)}

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(f"python lab/offline/pack.py {tmp_path}/packed --without-engine")
    said = run(f"bash lab/offline/unpack.sh {tmp_path}/packed/site {site}")
    assert f"no GPU, rollout_spec of {site}/rollout_spec/__init__.py" in said and "vllm 0." in said

    lab = ". lab/offline/environment.sh; python -m rollout_spec_lab.cli"
    run(f"{lab} bench verify --device cpu --rows 2 --drafts 0 3 --vocab-size 4000 --output {out}/verify.json")
    verified = json.loads((out / "verify.json").read_text())
    assert [len(cell["ms"]) for cell in verified["cells"]] == [3, 3] and verified["skipped"] == []
    compared = verified["comparison"]
    assert compared["words_that_differ"] == compared["flat"]["differ_from_cpu"] == 0 < compared["words"]

    trace = tmp_path / "trace.jsonl"
    trace.write_text(to_line("g", None, [5, 6, 7], [[*range(10, 30)] * 3, [*range(10, 30)] * 2]))
    run(
        f"{lab} gpu-check --parts start,steps,rollouts --gpu h100 --recording {trace} "
        f"--model-config {tiny_model}/config.json --rows 2 96 --methods off,sam:8 "
        f"--repeats 1 --minutes 5 --output {out}"
    )
    record = json.loads((out / "gpu-check.json").read_text())
    assert [part for part in PARTS if record[part]] == ["start", "steps", "rollouts"]
    _, plain, *engines = record["start"]["engines"].values()  # the first is another policy
    for engine in engines:  # without a head, and with one
        assert engine["same"] == engine["of"] == plain["of"] and engine["num_draft_tokens"] > 100
    steps = record["steps"]
    assert {(row["num_rows"], row["num_drafts"]) for row in steps["steps"]} == {
        (2, 0), (2, 3), (2, 7), (96, 0), (96, 3)
    }  # fmt: skip
    too_many = "96 rows of 64 tokens, 7 drafts: more than the 512 tokens that a step may have"
    assert too_many in steps["skipped"]
    assert all(row["roofline_s"] > 0 for row in steps["steps"])
    plain, drafted = record["rollouts"]["results"]
    assert plain["repeats"][0]["num_tokens"] == drafted["repeats"][0]["num_tokens"] == 100
    assert drafted["repeats"][0]["num_accepted_tokens"] > 10
    assert drafted["predicted_tokens_per_s"]["step_times"] > 0
