"""Policies with recurrent layers: with drafts they give the tokens that they give without.

The layers are in plain torch (`recurrent_layers.py`): where states are kept and read is vLLM's own doing.
"""

import json
import pathlib
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from rollout_spec import recurrent
from rollout_spec.vllm import plugin
from rollout_spec.vllm.fixes import apply
from rollout_spec.vllm.mrv2.graphs import for_plain_steps
from rollout_spec.vllm.refusals.checks import check_options
from rollout_spec.vllm.upstream import recurrent_rows
from rollout_spec.vllm.versions import minor, version
from tests.engine import recurrent_scenarios as scenarios
from tests.engine.conftest import KEYED, close, configured, core_of
from tests.engine.interpreting import interpreted
from tests.engine.mixtures import MIXING, NUM_MIXED, random_request
from tests.engine.recurrent_layers import replace_layers
from tests.engine.recurrent_scenarios import SEES, SHORT_STEPS, note_rows, served
from tests.engine.serving import assert_same, num_accepted, serve
from tests.engine.tiny_recurrent import make_mtp, make_recurrent
from tests.tiny_vl import IMAGE, make_image

MINOR = minor(version()) or 99
# 0.24 runs no Qwen3.5 of text alone; 0.23 has no such drafts.
MODEL = "qwen3_next" if MINOR == 24 else "qwen3_5"
# Of policies with layers of Mamba 2 and of one with a head.
SOME = ("crowded", "gate", "preempted")
GATED = {"num_speculative_tokens": 7, "batch_threshold": 4}
# Without drafts too, linear attention takes a prompt of one token for a decoding row, which reads what an
# earlier request left in its block.
UNDEFINED = {"single_tokens"} if MINOR < 32 else set[str]()

pytestmark = [
    pytest.mark.skipif(
        MINOR < 24,
        reason="recurrent policies draft from vLLM 0.24 on; tests/test_recurrent.py has the refusal",
    ),
    pytest.mark.usefixtures("own_process_groups"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of the tiny model; engines from here on have the layers in torch."""
    plugin.register()
    replace_layers()
    return make_recurrent(MODEL, tmp_path_factory.mktemp(MODEL))


def wrong(drafted, plain):
    assert drafted["counters"]["num_accepted_tokens"] > 50
    assert drafted["counters"]["num_failed_steps"] == 0
    assert drafted["rows"]["alone"] > 0, "rows without a draft after one, in steps without drafts"
    return {name for name in plain if plain[name] != drafted[name]} - UNDEFINED


@pytest.fixture(scope="module")
def results(model):
    drafted, plain = (served(model, spec, scenarios.FAST, **SHORT_STEPS) for spec in (GATED, None))
    return {"drafted": drafted, "plain": plain}


def test_drafts_change_nothing(results, model):
    rows = results["drafted"]["rows"]
    assert rows["beside drafts"] > 0 and rows["left out"] > 0
    assert wrong(results["drafted"], results["plain"]) == set()
    assert results["drafted"]["state_bytes"] == said_bytes(model, 7)


def test_a_full_graph_of_plain_steps_is_for_decoding_rows(results):
    """On MRV1, which takes it by a step's shape."""
    steps = results["drafted"]["graphs"]
    assert (False, True, True) in steps
    assert (True, True, False) in steps and (True, True, True) not in steps, "prompts of one token left"


@pytest.mark.skipif(MINOR < 29, reason="we refuse them on MRV2 of vLLM 0.24; run with 0.29 and 0.32")
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_mrv2_has_full_graphs_that_recurrent_layers_can_be_captured_in(name, results, tmp_path):
    """`results` has made the groups of processes that a dispatcher asks for."""
    from vllm.v1.worker.gpu.model_states import mamba_hybrid

    vllm_config = configured(make_recurrent(name, tmp_path), {"num_speculative_tokens": 7})
    manager = graphs_of_mrv2(vllm_config)
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    apply(recurrent_rows, mamba_hybrid)
    build = builder_of(name, vllm_config).build_for_cudagraph_capture
    built = [build(dummy_rows(each.num_reqs, each.num_tokens)) for each in captured]
    assert len(built) > 1
    if name == "qwen3_5":
        assert {each.num_tokens // each.num_reqs for each in captured} == {1}
        assert [each.num_spec_decodes for each in built] == [each.num_reqs for each in captured]
    else:
        assert {each.num_tokens // each.num_reqs for each in captured} == {8}
        with pytest.raises(AssertionError):
            build(dummy_rows(2, 2))
        nums_rows = [torch.numel(each.num_accepted_tokens) for each in built]
        assert nums_rows == [each.num_reqs for each in captured]


def graphs_of_mrv2(vllm_config):
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    query_len = 1 + vllm_config.num_speculative_tokens
    runner = SimpleNamespace(vllm_config=vllm_config, decode_query_len=query_len)
    with for_plain_steps(runner):
        mode, device = CUDAGraphMode.NONE, torch.device("cpu")
        manager = ModelCudaGraphManager(vllm_config, device, mode, runner.decode_query_len)
    assert runner.decode_query_len == query_len
    settings = manager.compilation_config  # now as with CUDA
    settings.cudagraph_capture_sizes, settings.max_cudagraph_capture_size = [1, 2, 4, 9, 16, 18], 18
    manager._candidates.clear()
    manager.cudagraph_mode, manager._graphs_captured = CUDAGraphMode.FULL_AND_PIECEWISE, True
    manager._init_candidates()
    return manager


def builder_of(name, vllm_config):
    k = vllm_config.num_speculative_tokens
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    spec = MambaSpec(block_size=512, shapes=((4, 4),), dtypes=(torch.float32,), num_speculative_blocks=k)
    kind = GDNAttentionMetadataBuilder if name == "qwen3_5" else Mamba2AttentionMetadataBuilder
    return kind(spec, ["layer"], vllm_config, torch.device("cpu"))


def dummy_rows(num_reqs, num_tokens):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    length = num_tokens // num_reqs
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * length
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=torch.full((num_reqs,), 16, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((num_reqs,), 16, dtype=torch.int32),
        is_prefilling=torch.zeros(num_reqs, dtype=torch.bool),
        num_reqs=num_reqs, num_actual_tokens=num_tokens, max_query_len=length, max_seq_len=16,
        block_table_tensor=torch.zeros(num_reqs, 16, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
    )  # fmt: skip


def said_bytes(model, k):
    fields = json.loads((pathlib.Path(model) / "config.json").read_text())
    states = recurrent.states_of(fields.get("text_config", fields), dtype_bytes=4)
    assert states is not None
    return states.num_bytes(k)


def drafted_right(folder, k, names=SOME, plain=None, head=None, threshold=4, **arguments):
    """What an engine with drafts of up to k tokens gives, once it is seen to be what one without gives."""
    spec = {"num_speculative_tokens": k, "batch_threshold": threshold}
    drafted = served(folder, spec, names, **arguments, **(head or {}))
    assert wrong(drafted, plain or served(folder, None, names, **arguments)) == set()
    assert drafted["state_bytes"] == said_bytes(folder, k)
    return drafted


@pytest.fixture(scope="module")
def mamba_2(model, tmp_path_factory):
    folder = make_recurrent("nemotron_h", tmp_path_factory.mktemp("nemotron_h"))
    return folder, served(folder, None, SOME, **SHORT_STEPS)


@pytest.mark.skipif(MINOR < 29, reason="we refuse Nemotron-H before vLLM 0.29: no CPU engine there runs it")
@pytest.mark.parametrize("k", [7, pytest.param(3, marks=pytest.mark.long)])
def test_drafts_change_nothing_with_layers_of_mamba_2(mamba_2, k):
    assert_right_with_mamba_2(*mamba_2, k)


@pytest.mark.long
@pytest.mark.skipif(MINOR < 32, reason="refused before vLLM 0.32: it keeps no convolution states for drafts")
@pytest.mark.parametrize("name", ["falcon_h1", "granite_hybrid", "zamba2"])
def test_drafts_change_nothing_with_other_policies_of_mamba_2(name, model, tmp_path):
    assert_right_with_mamba_2(make_recurrent(name, tmp_path))


def assert_right_with_mamba_2(folder, plain=None, k=7):
    """vLLM has full graphs of K + 1 tokens in every row for them: no prompt is in such a step."""
    drafted = drafted_right(folder, k, plain=plain, **SHORT_STEPS)
    assert {step for step in drafted["graphs"] if step[2]} == {(False, False, True)}


@pytest.mark.long
@pytest.mark.parametrize(("k", "arguments"), [(3, {"threshold": 64}), (7, SHORT_STEPS)], ids=["3", "7"])
def test_drafts_change_nothing_in_any_scenario(model, k, arguments):
    drafted_right(model, k, None, **arguments)


@pytest.mark.long
@pytest.mark.skipif(MINOR < 29, reason="on vLLM 0.24 all tests here are of Qwen3-Next, and none of Qwen3.5")
@pytest.mark.parametrize("k", [3, 7])
@pytest.mark.parametrize(
    ("name", "sees"),
    [("qwen3_5_moe", False), ("qwen3_next", False), ("qwen3_5", True), ("qwen3_5_moe", True)],
)
def test_drafts_change_nothing_with_experts_or_images(name, sees, k, model, tmp_path):
    destroy_model_parallel()  # the groups of engines of a dense model have none for experts
    names, arguments = (None, SHORT_STEPS | SEES) if sees else (SOME, SHORT_STEPS)
    drafted_right(make_recurrent(name, tmp_path, sees), k, names, **arguments)


@pytest.mark.long
@pytest.mark.skipif(MINOR < 29, reason="before vLLM 0.29 there is no Qwen3.5 of text alone")
@pytest.mark.parametrize("k", [3, 7])
def test_drafts_change_nothing_beside_an_mtp_head(k, model, tmp_path):
    """Rows then have drafts of any length."""
    drafted = drafted_right(make_mtp(MODEL, tmp_path), k, head=scenarios.with_mtp(k), **SHORT_STEPS)
    assert drafted["counters"]["num_model_accepted_tokens"] > 50


@pytest.mark.long
@pytest.mark.parametrize(
    "sees", [False, pytest.param(True, marks=pytest.mark.skipif(MINOR < 29, reason="there is no Qwen3.5"))]
)
def test_drafts_change_nothing_in_random_mixtures(sees, model, chat_model, tmp_path):
    """Of request options; grammars among them cut drafts down to none."""
    draw = random.Random(47)
    requests = [random_request(draw) for _ in range(NUM_MIXED)]
    arguments = MIXING | {"skip_tokenizer_init": False, "enable_prompt_embeds": not sees}
    if sees:
        folder = pathlib.Path(make_recurrent(MODEL, tmp_path, sees))
        requests = [with_images(each, scenarios.IMAGES[i % 4]) for i, each in enumerate(requests)]
        arguments |= SEES
    else:
        folder = shutil.copytree(model, tmp_path / "chat")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pathlib.Path(chat_model) / name, folder)
        requests = [with_embeddings(each, i % 3) if i % 4 == 0 else each for i, each in enumerate(requests)]
    spec = {"num_speculative_tokens": 3, "batch_threshold": 12}
    plain, drafted = (scenarios.new_recurrent_engine(str(folder), each, **arguments) for each in (None, spec))
    expected, rows = serve(plain, requests), note_rows(core_of(drafted).scheduler)
    for _ in range(2):  # the second time drafts come from the first
        assert_same(serve(drafted, requests), expected)
    assert num_accepted(drafted) > 50
    assert min(rows["alone"], rows["beside drafts"]) > 0
    close([plain, drafted])


def with_images(request, seeds):
    images = {"image": [*map(make_image, seeds)]}
    text = "".join(IMAGE) * len(seeds) + request.prompt
    return request._replace(prompt={"prompt": text, "multi_modal_data": images}) if seeds else request


def with_embeddings(request, seed):
    """vLLM refuses log-probabilities of such a prompt."""
    if request.params.prompt_logprobs is not None:
        return request
    rows = torch.randn(12, 128, generator=torch.Generator().manual_seed(seed))
    return request._replace(prompt={"prompt_embeds": rows})


@pytest.mark.long
@pytest.mark.skipif(MINOR < 29, reason="refused on MRV2 of vLLM 0.24: it has no prefix caching for them")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("runner", "head"), [("V1", "text"), ("V2", "text"), ("V2", "mtp"), ("V1", "images"), ("V2", "images")]
)
def test_drafts_change_nothing_where_prefixes_are_cached(runner, head, tmp_path):
    given = tmp_path / "results.json", "qwen3_5_small", head
    chosen = {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
    results = interpreted("tests.engine.recurrent_scenarios", *given, **chosen)
    drafted = results["drafted"]
    assert drafted["model_runner"].endswith({"V1": ".cpu_model_runner", "V2": ".cpu.model_runner"}[runner])
    assert wrong(drafted, results["plain"]) == set()
    assert (drafted["counters"]["num_model_accepted_tokens"] > 50) == (head == "mtp")


def test_refused_before_an_engine_process_is_launched(tmp_path, monkeypatch):
    transformers.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]).save_pretrained(tmp_path)
    configured(str(tmp_path), **KEYED)
    config = configured(str(tmp_path), {"num_speculative_tokens": 3})
    config.cache_config.mamba_cache_mode = "all"
    with pytest.raises(ValueError, match=r"^mamba_cache_mode=all: must be none or align [^\n]*\Z"):
        check_options(config)
    with pytest.raises(ValueError, match=r"^rollout\.spec\.num_speculative_tokens=15: must be at most 7 "):
        configured(str(tmp_path), {"num_speculative_tokens": 15})
    for_cpus = r"recurrent layers, whose kernels for CPUs take no [^\n]*\Z"
    for dtype in ["float16", *(["bfloat16"] if MINOR < 33 else [])]:
        with pytest.raises(ValueError, match=for_cpus):
            configured(str(tmp_path), {"num_speculative_tokens": 3}, dtype=dtype)
    if MINOR >= 29:
        from vllm.model_executor.layers.mamba import mamba_mixer2
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        # vLLM's own, whatever ran before in this process.
        monkeypatch.setattr(mamba_mixer2, "causal_conv1d_update", causal_conv1d_update)
        transformers.NemotronHConfig(architectures=["NemotronHForCausalLM"]).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=for_cpus):
            configured(str(tmp_path), {"num_speculative_tokens": 3})
    transformers.JambaConfig(architectures=["JambaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^rollout\.spec\.method=sam: JambaForCausalLM has layers of Mamba"):
        configured(str(tmp_path), {"num_speculative_tokens": 3})
