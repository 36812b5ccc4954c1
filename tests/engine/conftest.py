"""Real vLLM engines in the test's own process: two small models, and one way to make an engine."""

import contextlib
import gc
import itertools
import os
import shutil
import sys
from typing import Any

import pytest

from rollout_spec.vllm import plugin, speculative_config
from rollout_spec.vllm.versions import untested
from rollout_spec_lab.bench.forget import forget_all
from tests.engine.rollout_server import make_server  # noqa: F401

ENVIRONMENT = {
    # The engine lives in this process, so that a test can look at the drafter and undo a fix.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # One thread: the models are tiny, and threads that spin cost more than they give.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # oneDNN keeps code for every number of rows, 1,024 times: that would look like a leak of the drafter's.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}

closed = itertools.count(1)  # engines
VOCAB_SIZE = 128
EOS_TOKEN_ID = 2
UNTESTED = {"untested_vllm": True} if untested() else {}
# An engine without drafts whose samples are those of engines with drafts.
KEYED: dict[str, Any] = {"additional_config": {"rollout_spec": {"method": "keyed"}}}


@contextlib.contextmanager
def own_environment():
    """What is set here, and what vLLM adds (LD_PRELOAD), is not for the processes of other tests."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(1)  # another test may have imported it already
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", collect_unless_vllm_asks)
        yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="package", autouse=True)
def environment_of_engines():
    with own_environment():
        yield


def collect_unless_vllm_asks(generation=2, *, collect=gc.collect):
    """vLLM collects seven times an engine, each a fifth of a second or more in a process as large as this."""
    return 0 if sys._getframe(1).f_globals["__name__"].split(".")[0] == "vllm" else collect(generation)


EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "pad_token_id": 0,
}  # fmt: skip


def make_tiny(name, folder, peak=12, **more):
    """A small model with random weights: for what an engine does, not for what a model says."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096,
        "bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**settings | more)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(peak)  # a peaked distribution, as a trained model's is
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny("Llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def chat_model(tiny_model, tmp_path_factory):
    """The tiny model with a tokenizer, a token a character, so that a command can run it."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.BPE({chr(i): i for i in range(VOCAB_SIZE)}, []))
    characters.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(tiny_model, path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=chr(EOS_TOKEN_ID))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)


def engine_settings(model, spec=None):
    """vLLM's arguments, with a drafter where `spec` holds options."""
    import tests.engine.cpu_activation  # noqa: F401

    settings: dict[str, Any] = {
        "model": model, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16,
        "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True,
        "disable_log_stats": True, "seed": 0, "skip_tokenizer_init": True,
    }  # fmt: skip
    if spec is not None:
        spec = {"batch_threshold": 64, "num_speculative_tokens": 8, "history": 0} | UNTESTED | spec
        settings["speculative_config"] = speculative_config(spec["num_speculative_tokens"])
        settings["additional_config"] = {"rollout_spec": spec}
    return settings


def configured(model, spec=None, **arguments):
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    return EngineArgs(**engine_settings(model, spec) | arguments).create_engine_config()


def new_engine(tiny_model, spec=None, **arguments):
    """An LLM, drafting where `spec` holds options; of another model it has the tokenizer."""
    from vllm import LLM

    settings = engine_settings(tiny_model, spec) | {"skip_tokenizer_init": "model" not in arguments}
    return LLM(**settings | arguments)


@pytest.fixture(scope="module")
def shared_engines():
    """Engines of the tiny model, by their arguments; no test leaves anything in them."""
    engines: dict[str, Any] = {}
    yield engines
    close(engines.values())
    for engine in engines.values():
        core_of(engine).shutdown()


@pytest.fixture
def make_engine(tiny_model, shared_engines):
    """`make_engine(spec=None, **engine_arguments)`: `new_engine` of the tiny model, or of another one.

    It may be one that earlier tests have used, whose drafter has forgotten them. A test that changes its
    engine, needs two alike, or has requests without names (vLLM numbers those) asks for a `fresh` one.
    """

    def make(spec=None, *, fresh=False, **arguments):
        if fresh or "tensor_parallel_size" in arguments:
            engines.append(new_engine(tiny_model, spec, **arguments))
            return engines[-1]
        name = repr((spec, sorted(arguments.items())))
        if name not in shared_engines:
            shared_engines[name] = new_engine(tiny_model, spec, **arguments)
        return as_new(shared_engines[name])

    engines: list[Any] = []
    yield make
    close(engines)


def as_new(llm):
    """An engine that has served, with nothing left of it."""
    assert not llm.llm_engine.has_unfinished_requests()
    llm.reset_prefix_cache()
    if (proposer := proposer_of(llm)) is not None:
        forget_all(proposer)
    core_of(llm).rollout_spec_take_aborted()
    return llm


@pytest.fixture(scope="module")
def own_process_groups():
    """Engines of one process share their groups, and those that a dense model made have none for experts."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()
    yield
    destroy_model_parallel()


def close(engines):
    """Shut them down, but for the process groups, which engines in one process share.

    Their memory, which is part of reference cycles, goes when some have piled up. An engine also makes vLLM
    read no environment variable again, which would count for all tests after it.
    """
    from vllm.envs import disable_envs_cache

    for engine in engines:
        client = engine.llm_engine.engine_core
        if finalizer := getattr(client, "_finalizer", None):  # from vLLM 0.32 on it would end the groups too
            finalizer.detach()
        core = client.engine_core
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        gc.unfreeze()
        if next(closed) % 8 == 0:
            gc.collect()
    disable_envs_cache()


def core_of(llm):
    return llm.llm_engine.engine_core.engine_core


def runner_of(llm):
    return core_of(llm).model_executor.driver_worker.worker.model_runner


def proposer_of(llm):
    from rollout_spec.vllm.proposing import proposer

    return proposer.proposer_of(runner_of(llm))


def token_ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]
