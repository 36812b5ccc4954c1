"""The two examples for vLLM alone, run as they stand, and what vLLM cannot do refused in time."""

import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig
from vllm.v1.sample.rejection_sampler import RejectionSampler

from rollout_spec.cli import main
from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.doctor import diagnosis, patched
from rollout_spec.patches import PatchError
from rollout_spec.vllm import plugin, speculative_config, versions
from rollout_spec.vllm.mrv1.sampler import RowSampling
from rollout_spec.vllm.refusals import checks
from rollout_spec.vllm.refusals.checks import check_options
from rollout_spec.vllm.refusals.table import refuse
from rollout_spec.vllm.versions import version
from rollout_spec_lab.processes import started
from tests.engine.conftest import KEYED, UNTESTED, configured, proposer_of
from tests.text import save_corpus

# The gate of the examples measures time: on some machines a short text is over before it opens.
DRAFTING = {"rollout_spec": {"batch_threshold": 64} | UNTESTED}
PAGE = pathlib.Path(__file__).parents[2] / "docs/getting-started/vllm.md"


def example(language, model):
    [block] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return block.replace("path/to/model", model)


@pytest.fixture(scope="module")
def environment():
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return env | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}


def test_the_python_example_runs_as_a_script(chat_model, environment, tmp_path):
    small = "max_num_batched_tokens=512, enforce_eager=True, disable_log_stats=False"
    small += f", dtype='float32', additional_config={DRAFTING}"
    counted = "[one.value for one in llm.get_metrics() if one.name == 'vllm:spec_decode_num_accepted_tokens']"
    script = example("python", chat_model).replace("LLM(\n", f"LLM(\n        {small},\n")
    said = f"print('FOUND', sum({counted}), len(outputs))"
    for old, new in {"4096": "1024", "1 << 30": "1 << 28", "print(outputs[0].outputs[0].text)": said}.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "script.py").write_text(script)
    env = environment | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    [found] = re.findall(r"^FOUND (\d+) (\d+)$", done.stdout, re.MULTILINE) or [done.stderr]
    assert int(found[0]) > 0 and found[1] == "4", found


@pytest.mark.long
def test_the_server_example(chat_model, environment, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = shlex.split(example("sh", chat_model).replace("\\\n", " "))
    assert command[:2] == ["vllm", "serve"]
    command[0] = str(pathlib.Path(sys.executable).with_name("vllm"))
    # vllm-cpu's script asks for a distribution `vllm`, what it starts does not. Tests of the CPU patches may
    # have made this process answer for that one.
    if any(importlib.metadata.distributions(name="vllm-cpu")):
        command[:2] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    # `auto` would be bfloat16, whose rounding is a processor's own.
    command += ["--enforce-eager", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--additional-config", json.dumps(DRAFTING)]
    command += ["--max-model-len", "1024", "--max-num-batched-tokens", "512"]
    body = {"model": chat_model, "prompt": "one two three four " * 8, "temperature": 0, "max_tokens": 64}
    body |= {"ignore_eos": True, "vllm_xargs": {"rollout_spec_group": "a"}}
    with started(command, log := tmp_path / "server.log", environment) as server:
        wait_until_ready(server, port, log)
        answer = json.loads(ask(port, "v1/completions", json.dumps(body).encode()))
        metrics = ask(port, "metrics")
    assert answer["usage"]["completion_tokens"] == 64
    name = "vllm:spec_decode_num_accepted_tokens_total"
    accepted = re.search(rf"^{name}\{{.*\}} ([\d.e+]+)$", metrics, re.MULTILINE)
    assert accepted is not None and float(accepted[1]) > 0


def ask(port, path, body=None):
    url, kind = f"http://127.0.0.1:{port}/{path}", {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=300).read().decode()


def wait_until_ready(server, port, log):
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            ask(port, "health")
        except OSError:
            time.sleep(1)
        else:
            return
    raise TimeoutError(log.read_text()[-3000:])


SPECULATIVE = speculative_config(8)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
BY_BATCH = "num_speculative_tokens_per_batch_size"  # vLLM 0.23 does not have it
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5] * 8}
LOSSY = {"speculative_config": SPECULATIVE | SYNTHETIC}
LOOPED = {"hf_overrides": {"recurrent_kv_cache_mode": "last_loop"}}
LAUNCHED = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({}, {"batch_treshold": 4}, r"rollout\.spec\.batch_treshold: unknown field"),
        ({}, {"corpus": "/nowhere.jsonl"}, r"rollout\.spec\.corpus='/nowhere\.jsonl': No such file"),
        ({}, {"method": "off"}, r"rollout\.spec\.method=off together with"),
        ({"speculative_config": NGRAM}, {"method": "keyed"}, r"method=keyed goes with mtp, [^\n]*none\Z"),
        ({"speculative_config": None}, {}, r"rollout\.spec\.method=sam without"),
        ({"speculative_config": SPECULATIVE}, {"num_speculative_tokens": 4}, r"tokens=4 differs from"),
        ({"override_generation_config": {"min_p": 0.1}}, {}, r"generation_config\.min_p"),
        ({"logits_processors": ["json.JSONDecoder"]}, {}, r"logits_processors"),
        (LOOPED, {}, r"^recurrent_kv_cache_mode=last_loop: [^\n]*run this policy without drafts\Z"),
        (LAUNCHED, {"batch_threshold": "auto"}, r"batch_threshold=auto: must be a number with"),
        ({"pipeline_parallel_size": 2}, {}, r"pipeline_parallel_size=2: must be 1 with rollout\.spec\.met"),
        (LOSSY, {}, r"synthetic: must be standard or block with [^\n]*changes what the policy says"),
        ({"async_scheduling": True}, {}, r"^async_scheduling: needs vLLM's MRV2[^\n]*\Z"),
        pytest.param(
            {"speculative_config": SPECULATIVE | {BY_BATCH: [[1, 64, 8]]}},
            {},
            BY_BATCH + (r": the drafter has its own gate" if version() != "0.23.0" else ""),
            marks=pytest.mark.skipif(bool(UNTESTED), reason="vLLM 0.33 turns it off on MRV1, and says so"),
        ),
    ],
)
def test_refused_before_an_engine_process_is_launched(tiny_model, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        configured(tiny_model, options, **arguments)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_drafts_are_refused_where_a_rows_rotations_follow_from_others(tiny_model, kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= dict.fromkeys(("short_factor", "long_factor"), [1.0] * 8)
    of_transformers = {"model_impl": "transformers", "hf_overrides": {"rope_parameters": rope}}
    with pytest.raises(ValueError, match=r"^max_model_len=\d+: [^\n]* beyond 64 positions[^\n]*most 64\Z"):
        configured(tiny_model, {}, **of_transformers)
    configured(tiny_model, {}, **of_transformers, max_model_len=64)
    configured(tiny_model, {}, hf_overrides=of_transformers["hf_overrides"])
    configured(tiny_model, **KEYED, **of_transformers)


@pytest.mark.parametrize(
    ("policy", "cache", "found"),
    [
        ("LlamaForCausalLM", "turboquant_4bit_nc", "kv_cache_dtype=turboquant_4bit_nc"),
        ("LlamaForCausalLM", "ultraquant_4bit", "kv_cache_dtype=ultraquant_4bit"),
        ("MiniMaxM3SparseForCausalLM", "nvfp4", "kv_cache_dtype=nvfp4"),  # of vLLM 0.32
        ("Step5ForCausalLM", "auto", "Step5ForCausalLM"),  # of vLLM 0.33
    ],
)
def test_drafts_are_refused_where_attention_fails_with_them(tiny_model, policy, cache, found, monkeypatch):
    drafting, without = configured(tiny_model, {}), configured(tiny_model, **KEYED)
    monkeypatch.setattr(ModelConfig, "architecture", policy)
    for config in drafting, without:
        config.cache_config.cache_dtype = cache  # CPUs have no such attention
    with pytest.raises(ConfigError, match=rf"^{found}: [^\n]*policy without them\Z"):
        check_options(drafting)
    check_options(without)


@pytest.mark.parametrize(("vocabulary", "is_refused"), [(233_016, False), (233_017, True), (248_320, True)])
def test_drafts_are_refused_where_steps_have_too_many_logits(tiny_model, vocabulary, is_refused, monkeypatch):
    """Of 1,024 rows with 8 tokens of a model, with MRV2 of vLLM 0.24; not on MRV1, nor of shorter steps.

    Ours has fewer in a step.
    """
    monkeypatch.setattr(ModelConfig, "get_vocab_size", lambda _: vocabulary)
    monkeypatch.setattr(checks, "is_before", lambda minor: minor <= 29)
    config = configured(tiny_model, {}, max_num_seqs=1024, max_num_batched_tokens=16_384)
    for is_mrv2, num_tokens in ((True, 16_384), (False, 16_384), (True, 8192)):
        monkeypatch.setattr(type(config), "use_v2_model_runner", is_mrv2)
        config.scheduler_config.max_num_batched_tokens = num_tokens
        assert checks._wide_logits(config, SpecConfig()) is None
        found = checks._wide_logits(config, SpecConfig(method="keyed"))
        refused = SimpleNamespace(asked=num_tokens, most=2**31 // vocabulary)
        assert (found == refused) == (is_refused and is_mrv2 and num_tokens > 8192)


@pytest.mark.parametrize(
    ("mode", "is_mrv2", "old", "is_refused"),
    [("FULL", True, 29, True), ("FULL", True, 32, False), ("FULL", False, 29, False),
     ("FULL_AND_PIECEWISE", True, 29, False)],
)  # fmt: skip
def test_graphs_that_let_drafts_read_later_ones_are_refused(
    tiny_model, mode, is_mrv2, old, is_refused, monkeypatch
):
    config = configured(tiny_model, {})
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    monkeypatch.setattr(checks, "is_before", lambda minor: minor > old)
    monkeypatch.setattr(type(config), "use_v2_model_runner", is_mrv2)
    refused = pytest.raises(ConfigError, match=r"^[^\n]*take FULL_AND_PIECEWISE$")
    with refused if is_refused else nullcontext():
        refuse(checks._facts_of_our_drafter(config, SpecConfig()), "a model")


def test_ranks_of_prefill_context_parallelism_are_refused(tiny_model):
    """They would draft different tokens, and hang."""
    config = configured(tiny_model, {})
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ConfigError, match=r"^prefill_context_parallel_size=2: must be 1 with [^\n]*$"):
        check_options(config)


def test_options_of_ours_compile_nothing_anew(tiny_model):
    """vLLM finds what it has compiled by this hash."""
    hashes = [configured(tiny_model, spec).compute_hash() for spec in ({"history": 1}, {"history": 2})]
    others = configured(tiny_model, additional_config={"theirs": 1}), configured(tiny_model, **KEYED)
    assert len({*hashes}) == 1 and len({each.compute_hash() for each in others}) == 2


def test_a_vllm_that_is_too_old_is_refused_in_one_line(tiny_model, monkeypatch):
    monkeypatch.setattr(plugin.misfits, "failure", None)
    monkeypatch.setattr(versions, "version", lambda: "0.22.1")
    plugin.register()
    with pytest.raises(ValueError, match=r"^vllm 0\.22\.1 is not supported: take 0\.23 or later[^\n]*$"):
        configured(tiny_model, {})


def test_coupled_verification_refuses_a_model_runner_v2_that_it_does_not_fit(tiny_model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    # As where vLLM's own conditions hold: here it refuses for want of Triton.
    monkeypatch.setattr(VllmConfig, "_validate_v2_model_runner", lambda _: None)
    monkeypatch.setattr("rollout_spec.vllm.refusals.checks.mrv2_misfit", lambda: "it has changed")
    message = r"method=keyed: .* rollout_spec: it has changed\. Set VLLM_USE_V2_MODEL_RUNNER=0$"
    with pytest.raises(ValueError, match=message):
        configured(tiny_model, **KEYED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([1, 2, 10**6], "has the token 1000000, the model's vocabulary is of"),
        (list(range(200)) * 200, "takes more than max_index_mb=1; raise it"),
    ],
)
def test_a_corpus_of_another_tokenizer_or_without_room_is_refused(tiny_model, tmp_path, text, message):
    corpus = save_corpus(tmp_path / "corpus.jsonl", [text])
    with pytest.raises(ValueError, match=rf"corpus\.jsonl': {message}"):
        configured(tiny_model, {"corpus": str(corpus), "max_index_mb": 1})


def test_without_the_plugin_the_engine_does_not_start(tiny_model, environment):
    code = (
        "from vllm import LLM\n"
        f"LLM(model={tiny_model!r}, skip_tokenizer_init=True, dtype='float32', max_model_len=128,\n"
        f"    enforce_eager=True, speculative_config={speculative_config(2)})\n"
    )
    env = environment | {"VLLM_PLUGINS": "none", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert "vLLM did not load the plugin 'rollout_spec'" in done.stderr


@pytest.mark.parametrize(
    ("where", "patch"),
    [
        ("sampler.Sampler.forward", "keyed-sampler"),
        ("ops.topk_topp_sampler.TopKTopPSampler.forward_native", "keyed-sampler"),
        ("rejection_sampler.RejectionSampler.forward", "coupled-verification"),
        ("logits_processor.builtin.MinTokensLogitsProcessor.apply_with_spec_decode", "min-tokens-bonus"),
        ("rejection_sampler.RejectionSampler._get_logprobs_tensors", "kept-logprobs"),
        ("rejection_sampler.rejection_sample", "coupled-verification"),
    ],
)
def test_other_samplers_of_vllm_are_refused_and_doctor_fails(tiny_model, monkeypatch, capsys, where, patch):
    monkeypatch.setattr(plugin.misfits, "failure", None)
    monkeypatch.setattr(diagnosis, "PROBES", [("engine patches", patched.in_engines)])
    assert main(["doctor"]) == 0
    monkeypatch.setattr(f"vllm.v1.sample.{where}", lambda self, other: None)
    message = f"patch 'vllm-{patch}' does not fit the installed packages"
    capsys.readouterr()
    assert main(["doctor"]) == 1
    line, *_ = capsys.readouterr().out.splitlines()  # failures come first
    assert line.startswith(f"fail  engine patches  PatchError: {message}")
    refusal = r"^patch '[\w-]+' does not fit the installed packages[^\n]*$"
    with pytest.raises((PatchError, ConfigError), match=refusal):
        configured(tiny_model, {})


def test_an_engine_whose_sampler_takes_other_arguments_does_not_start(make_engine):
    """A platform's own class instead of vLLM's, as vllm-ascend has them."""

    class Another(RejectionSampler):
        def forward(self, metadata, draft_probs, logits, bonus_token_ids, sampling_metadata):  # type: ignore
            raise AssertionError("must not be called")

    runner = proposer_of(make_engine({}, fresh=True))._runner
    runner.rejection_sampler = Another(runner.sampler)
    message = "'vllm-coupled-verification' does not fit .*: Another.forward takes self, metadata, "
    with pytest.raises(PatchError, match=message):
        RowSampling(runner).install()
