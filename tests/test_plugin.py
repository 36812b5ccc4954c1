"""The plugin in a process that has imported vLLM first: what does not fit is refused, or left out."""

import json
import os
import subprocess
import sys

import pytest

# `from vllm import LLM` imports what the plugin patches; only `LLM(...)` loads the plugin.
MAIN = """
import json, logging, sys
from vllm import LLM
from vllm.v1.engine import input_processor, output_processor
from vllm.v1.sample import thinking_budget_state
from vllm.v1.worker import gpu_input_batch, worker_base
from rollout_spec import patches
from rollout_spec.vllm import plugin, speculative_config

said = []
# A filter: vLLM 0.32 takes handlers away.
logger = logging.getLogger("vllm.rollout_spec.vllm.plugin")
logger.addFilter(lambda record: not said.append(record.getMessage()))

def errors():
    "What an engine with our drafter, one with our noise, and one of vLLM's own end with: there is no model."
    found = []
    asked = {"rollout_spec": {}}, {}, {"rollout_spec": "sam"}, {"rolloutspec": {}}
    configs = ({"additional_config": each} for each in asked)
    for arguments in ({"speculative_config": speculative_config(4)}, *configs):
        try:
            LLM(sys.argv[1], skip_tokenizer_init=True, **arguments)
        except Exception as error:
            found.append(str(error))
    return found

worker, processor = worker_base.WorkerWrapperBase, input_processor.InputProcessor
init_device, worker.init_device = worker.init_device, lambda self, other: None
thinking_budget_state.ThinkingBudgetStateHolder.sync_batch = lambda self: None
del gpu_input_batch.InputBatch
result = {"signature": errors()}
worker.init_device = init_device
outputs = output_processor.OutputProcessor
del input_processor.InputProcessor, output_processor.OutputProcessor
plugin.register()
result["name"] = errors()
input_processor.InputProcessor, output_processor.OutputProcessor = processor, outputs
plugin.register()
result["fixes"] = errors()
plugin.import_patched()
result["applied"] = [patch.name for patch in patches.applied()]
print(json.dumps({**result, "left_out": sorted(plugin.misfits.left_out), "said": said}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    run = subprocess.run(
        [sys.executable, "-c", MAIN, str(tmp_path_factory.mktemp("empty"))],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},  # a command that a test ran here has set ERROR
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("signature", "patch 'vllm-bind-proposer' does not fit the installed packages: "),
        ("name", "rollout_spec does not fit the installed vLLM: AttributeError("),
    ],
)
def test_a_vllm_that_was_imported_first_and_does_not_fit_is_refused(found, changed, reason):
    drafting, keyed, plain = found[changed][:3]
    assert drafting == keyed
    assert drafting.startswith(reason) and "\n" not in drafting
    assert changed == "signature" or "'InputProcessor'" in drafting, "of two reasons, the first"
    assert "does not fit" not in plain, "an engine that does not ask for us is vLLM's own"


def test_a_fix_that_does_not_fit_is_left_out_with_one_warning_and_what_is_nearly_asked_for_refused(found):
    assert not [error for error in found["fixes"] if "does not fit" in error]
    assert found["left_out"] == ["vllm-allowed-token-ids", "vllm-embedded-prompts", "vllm-thinking-budget"]
    assert ["is left out" in message for message in found["said"]] == [True] * 3
    assert [error.partition(": ")[0] for error in found["fixes"][3:]] == [
        "additional_config['rollout_spec']='sam'", "additional_config has the key 'rolloutspec'"
    ]  # fmt: skip


def test_all_that_engines_patch_can_be_listed_without_one(found):
    """As `doctor` does; these are of each version that is tested."""
    names = {"check-options", "bind-proposer", "aborted-counts", "refuse-requests"}
    assert {f"vllm-{name}" for name in names} <= set(found["applied"])
    assert "vllm-thinking-budget" not in found["applied"], "which was left out"
