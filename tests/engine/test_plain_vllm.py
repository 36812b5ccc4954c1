"""The two examples for vLLM alone, run as they stand, and what vLLM cannot do refused in time."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_spec.patches import Patch, replace_function
from rollout_spec.vllm import speculative_config
from rollout_spec.vllm.versions import version
from tests.engine.conftest import close, engine_settings
from tests.text import save_corpus

# The gate of the examples measures time: on some machines a short text is over before it opens.
DRAFTING = {"rollout_spec": {"batch_threshold": 64}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
PAGE = pathlib.Path(__file__).parents[2] / "docs/getting-started/vllm.md"


def example(language: str, model: str) -> str:
    [block] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return block.replace("path/to/model", model)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Engines in processes of their own, as a user has them."""
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return env | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}


def run(code: str, env: dict[str, str], tmp_path: pathlib.Path) -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=400, check=False, env=env
    )


def test_the_python_example(policy: str) -> None:
    small = "max_model_len=1024, max_num_batched_tokens=512, enforce_eager=True, disable_log_stats=False"
    small += f", kv_cache_memory_bytes=1 << 28, additional_config={DRAFTING}"
    names: dict[str, Any] = {}
    exec(example("python", policy).replace("LLM(\n", f"LLM(\n    {small},\n"), names)
    values = {metric.name: metric.value for metric in names["llm"].get_metrics() if hasattr(metric, "value")}
    close([names["llm"]])
    assert len(names["outputs"]) == 4
    assert values["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.fixture(scope="module")
def port(policy: str, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of the server of the example."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    command = shlex.split(example("sh", policy).replace("\\\n", " "))
    assert command[:2] == ["vllm", "serve"]
    command = [*server_command(), *command[2:]]
    command += ["--host", "127.0.0.1", "--port", str(number), "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-batched-tokens", "512"]
    command += ["--additional-config", json.dumps(DRAFTING)]
    path = tmp_path_factory.mktemp("server") / "server.log"
    with path.open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            wait_until_ready(server, number, path)
            yield number
        finally:
            end(server)


def num_accepted(port: int) -> float:
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    accepted = re.search(
        r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} ([\d.e+]+)$", metrics, re.MULTILINE
    )
    assert accepted is not None
    return float(accepted[1])


def test_the_server_example(policy: str, port: int) -> None:
    body = {"model": policy, "prompt": "one two three four " * 8, "temperature": 0}
    body |= {"max_tokens": 64, "ignore_eos": True}
    answer = request(port, "/v1/completions", body | {"vllm_xargs": {"rollout_spec_group": "a"}})
    assert answer["usage"]["completion_tokens"] == 64
    assert num_accepted(port) > 0


def test_stop_strings_end_what_the_server_counts(policy: str, port: int) -> None:
    """Drafts come from the same sample without stops, and go on behind each of them."""
    body = {"model": policy, "prompt": "Once upon a time", "temperature": 0.8, "max_tokens": 32}
    body |= {"ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    body |= {"vllm_xargs": {"rollout_spec_key": "a tale"}}
    free = request(port, "/v1/completions", body)
    [whole] = free["choices"]
    pieces, before = whole["logprobs"]["tokens"], num_accepted(port)
    assert len(pieces) == free["usage"]["completion_tokens"] == 32
    for first in (10, 11, 13):
        early, late = ("".join(pieces[i : i + 2]) for i in (first, first + 3))
        text, num_tokens = cut(pieces, early)
        for stops in ([early], [late, early]):
            for asked in (body | {"stop": stops}, body | {"stop": stops, **STREAM}):
                answer = request(port, "/v1/completions", asked)
                [choice] = answer["choices"]
                assert choice["text"] == text
                assert choice["token_ids"] == whole["token_ids"][:num_tokens]
                assert choice["logprobs"]["tokens"] == pieces[:num_tokens]
                logprobs = whole["logprobs"]["token_logprobs"][:num_tokens]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=2e-4)
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", early)
                assert answer["usage"]["completion_tokens"] == num_tokens
    assert num_accepted(port) > before


def cut(pieces: list[str], stop: str) -> tuple[str, int]:
    """The text before a stop string, and how many tokens it takes to see that string."""
    num_tokens = next(num for num in range(len(pieces)) if stop in "".join(pieces[:num]))
    return "".join(pieces[:num_tokens]).split(stop)[0], num_tokens


def server_command() -> list[str]:
    """`vllm serve`; the script of vllm-cpu asks for a distribution `vllm`, what it starts does not."""
    # Not the distribution `vllm` itself: tests of the CPU patches may have made this process answer for it.
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return [str(pathlib.Path(sys.executable).with_name("vllm")), "serve"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def end(server: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def wait_until_ready(server: subprocess.Popen, port: int, log: pathlib.Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except OSError:
            time.sleep(1)
        else:
            return
    raise TimeoutError(log.read_text()[-3000:])


def request(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer; the parts of a stream are put together."""
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=300) as answer:
        if not body.get("stream"):
            return json.load(answer)
        lines = [line.decode().removeprefix("data: ") for line in answer if line.strip()]
    *parts, usage = [json.loads(line) for line in lines[:-1]]  # the last one says that it is
    whole: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": {"tokens": [], "token_logprobs": []}}
    for part in parts:
        [choice] = part["choices"]
        whole["text"] += choice["text"]
        whole["token_ids"] += choice["token_ids"]
        for name, values in whole["logprobs"].items():
            values += choice["logprobs"][name]
    return {"choices": [choice | whole], "usage": usage["usage"]}


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core_client

    def launch(*_: Any, **__: Any) -> None:
        pytest.fail("an engine was launched")

    monkeypatch.setattr(core_client.EngineCoreClient, "make_client", launch)


def spec(**options: Any) -> dict[str, Any]:
    return {"batch_threshold": 8, **options}


SPECULATIVE = speculative_config(8)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({}, {"num_speculative_tokens": 65}, r"num_speculative_tokens=65: must be between 1 and 64"),
        ({}, {"batch_treshold": 4}, r"rollout\.spec\.batch_treshold: unknown field"),
        ({}, {"corpus": "/nowhere.sam"}, r"rollout\.spec\.corpus='/nowhere\.sam': No such file or directory"),
        ({}, {"method": "off"}, r"rollout\.spec\.method=off together with"),
        ({"override_generation_config": {"min_p": 0.1}}, {}, r"generation_config\.min_p"),
        ({"logits_processors": ["json.JSONDecoder"]}, {}, r"logits_processors"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            {"batch_threshold": "auto"},
            r"batch_threshold=auto: must be a number with",
        ),
        (
            {"pipeline_parallel_size": 2},
            {},
            r"pipeline_parallel_size=2: must be 1 with rollout\.spec\.method",
        ),
        ({"async_scheduling": True}, {}, r"^async_scheduling: needs vLLM's MRV2[^\n]*\Z"),
        (
            {"speculative_config": SPECULATIVE | {"num_speculative_tokens_per_batch_size": [[1, 64, 8]]}},
            {},
            r"num_speculative_tokens_per_batch_size"  # vLLM 0.23 does not have it
            + (r": the drafter has its own gate" if version() != "0.23.0" else ""),
        ),
    ],
)
def test_refused_before_an_engine_process_is_launched(
    make_engine: Any, no_launch: None, arguments: dict, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(spec(**options), **arguments)


def test_a_vllm_that_is_too_old_is_refused_in_one_line(
    make_engine: Any, no_launch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout_spec.vllm import plugin, versions

    monkeypatch.setattr(plugin, "failure", None)
    monkeypatch.setattr(versions, "version", lambda: "0.22.1")
    plugin.register()
    with pytest.raises(ValueError, match=r"^vllm 0\.22\.1 is not supported: take 0\.23 or later[^\n]*$"):
        make_engine(spec())


def test_a_module_that_a_patch_does_not_fit_is_imported_and_our_engines_are_refused(
    make_engine: Any, no_launch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout_spec.vllm import plugin

    def mend(module: Any) -> None:
        replace_function(module, "gone", print, patch=Patch("late", "a reason", "a file", "later"))

    monkeypatch.setattr(plugin, "failure", None)
    plugin._apply(mend, pathlib)
    with pytest.raises(ValueError, match=r"^patch 'late' does not fit the installed [^\n]*$"):
        make_engine(spec())


def test_a_vllm_with_another_sampler_is_refused(
    make_engine: Any, no_launch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.sampler import Sampler

    monkeypatch.setattr(Sampler, "forward", lambda self, other: None)
    with pytest.raises(RuntimeError, match=r"^patch 'vllm-keyed-sampler' does not fit the installed [^\n]*$"):
        make_engine(spec())


def test_coupled_verification_refuses_a_model_runner_v2_that_it_does_not_fit(
    make_engine: Any, no_launch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    # As where vLLM's own conditions hold: here it refuses for want of Triton.
    monkeypatch.setattr(VllmConfig, "_validate_v2_model_runner", lambda _: None)
    monkeypatch.setattr("rollout_spec.vllm.checks.mrv2_misfit", lambda: "it has changed")
    with pytest.raises(
        ValueError, match=r"verify=coupled: .* rollout_spec: it has changed\. Set VLLM_USE_V2_MODEL_RUNNER=0$"
    ):
        make_engine(additional_config={"rollout_spec": {"method": "off", "verify": "coupled"}})


def test_a_model_with_a_recurrent_state_has_no_drafts_of_ours(tmp_path: pathlib.Path) -> None:
    import transformers
    from vllm.engine.arg_utils import EngineArgs

    transformers.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]).save_pretrained(tmp_path)
    off = {"additional_config": {"rollout_spec": {"method": "off", "verify": "coupled"}}}
    EngineArgs(**engine_settings(str(tmp_path)) | off).create_engine_config()
    with pytest.raises(ValueError, match=r"^rollout\.spec\.method=sam: .* recurrent model [^\n]*$"):
        EngineArgs(**engine_settings(str(tmp_path), spec())).create_engine_config()


def test_a_corpus_of_another_tokenizer_is_refused(
    make_engine: Any, no_launch: None, tmp_path: pathlib.Path
) -> None:
    corpus = save_corpus(tmp_path / "other.sam", [[1, 2, 10**6]])
    with pytest.raises(ValueError, match=r"other\.sam': has the token 1000000, the model's vocabulary is of"):
        make_engine(spec(corpus=str(corpus)))


def test_two_numbers_of_draft_tokens_are_refused(make_engine: Any) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=4 differs from"):
        make_engine(spec(num_speculative_tokens=4), speculative_config=SPECULATIVE)


def test_without_the_plugin_the_engine_does_not_start(
    tiny_model: str, environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    code = (
        "from vllm import LLM\n"
        f"LLM(model={tiny_model!r}, skip_tokenizer_init=True, max_model_len=128, enforce_eager=True,\n"
        f"    speculative_config={speculative_config(2)})\n"
    )
    environment = environment | {"VLLM_PLUGINS": "none", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    result = run(code, environment, tmp_path)
    assert result.returncode != 0
    assert "vLLM did not load the plugin 'rollout_spec'" in result.stderr
