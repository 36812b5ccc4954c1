"""MTP, EAGLE-3 with a vocabulary of its own, and a weight sync of verl's; as `interpreted_model`, on MRV2."""

import importlib.util
import os
import pathlib

from rollout_spec.vllm.proposing.proposer import proposer_of
from tests.engine.conftest import close, core_of, engine_settings, runner_of
from tests.engine.interpreted_model import NUM_MODEL_TOKENS
from tests.engine.interpreted_runner import run, serve_named
from tests.engine.rollout_server import EXTENSION

NAMES = ("greedy", "sampled", "one")
MTP = {"method": "mtp", "num_speculative_tokens": 8}


def main(models):
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # vLLM 0.24 has V1 for MiMo
    return served_heads(pathlib.Path(models))


def served_heads(models):
    folders = {path.name: str(path) for path in models.iterdir()}
    spec = {"model_tokens": NUM_MODEL_TOKENS}
    eagle3 = {"method": "eagle3", "model": folders["eagle3"], "num_speculative_tokens": 8}
    even = eagle3 | {"model": folders["even-eagle3"], "num_speculative_tokens": NUM_MODEL_TOKENS}
    return {
        "plain": run(folders["target"], None, names=NAMES),
        "plain mtp": run(folders["mtp"], None, names=NAMES),
        "mtp": synced(folders, spec),
        "eagle3": run(folders["target"], spec, names=NAMES, speculative_config=eagle3),
        "even": run(folders["even"], None, names=("one",), speculative_config=even),
    }


def synced(folders, spec):
    """The requests with a wrong head, with the right one, and with that of another model, which stays."""
    from vllm import LLM

    has_verl = importlib.util.find_spec("verl") is not None
    settings = engine_settings(folders["mtp"], spec) | {"max_model_len": 256, "skip_tokenizer_init": False}
    settings["speculative_config"] = MTP
    llm = LLM(**settings, **({"worker_extension_cls": EXTENSION} if has_verl else {}))
    worker, runner = core_of(llm).model_executor.driver_worker.worker, runner_of(llm)

    def served():
        requests = serve_named(llm, NAMES)
        return {"requests": requests, "counters": proposer_of(runner).take_counters().to_dict()}

    found = {"wrong": served()}
    if has_verl:
        from safetensors.torch import load_file

        wrong, right = pathlib.Path(folders["mtp"], "model.safetensors"), folders["right.safetensors"]
        # In two buckets, as verl sends them.
        weights = list(load_file(right).items())
        for bucket in (weights[:9], weights[9:]):
            worker._update_weights(bucket, peft_config=None, base_sync_done=True)
        found["right"] = served()
        runner.vllm_config.speculative_config.model = "another"
        worker._update_weights(list(load_file(wrong).items()), peft_config=None, base_sync_done=True)
        found["kept"] = served()
    close([llm])
    return {"model_runner": type(runner).__module__, "heads": found}
