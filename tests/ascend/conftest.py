"""Whole engines of vllm-ascend, on the stub's stand-ins for its kernels, and its model runner alone."""

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.envs import disable_envs_cache

from tests.engine import conftest as engines
from tests.engine.conftest import chat_model, environment_of_engines, tiny_model  # noqa: F401 (fixtures)
from tests.engine.serving import Request, sampling
from tests.engine.tiny_heads import let_the_last_token_decide, loaded, save_as

K = 4


@pytest.fixture(scope="session")
def coarse_model(tmp_path_factory):
    """Its logits are whole numbers, many of them equal, and of the last token only: text repeats itself.

    They are exact in whatever order they are added up, so that equal ones stay equal.
    """
    path = engines.make_tiny("Llama", tmp_path_factory.mktemp("models"), rms_norm_eps=0.0)
    weights = loaded(Path(path))
    let_the_last_token_decide(weights)
    head = weights["lm_head.weight"]
    draw = functools.partial(torch.randint, size=head.shape, generator=torch.Generator().manual_seed(0))
    head.copy_((draw(8) == 0) * (2 * draw(2) - 1))
    save_as(Path(path), weights)
    return path


@contextlib.contextmanager
def engine(model, spec, **arguments):
    options = None if spec is None else {"num_speculative_tokens": K} | spec
    llm = engines.new_engine(model, options, **arguments)
    disable_envs_cache()  # with which an engine has begun: other tests set variables
    yield llm
    engines.close([llm])


def siblings(*kinds, num=4):
    asked = [({"temperature": 1.0, "max_tokens": 60} | kind, [1, 2, 3 + i]) for i, kind in enumerate(kinds)]
    return [Request(prompt, sampling(kind, key=[j, *prompt])) for kind, prompt in asked for j in range(num)]


def noted_lengths(llm):
    """Of each row and step from now on, the prefills excluded: how many draft tokens are verified."""
    scheduler, lengths = engines.core_of(llm).scheduler, list[int]()
    schedule = scheduler.schedule

    def schedule_and_note(*args, **kwargs):
        output = schedule(*args, **kwargs)
        drafts = output.scheduled_spec_decode_tokens
        lengths.extend(len(drafts.get(name, ())) for name in output.scheduled_cached_reqs.req_ids)
        return output

    scheduler.schedule = schedule_and_note
    return lengths


@contextlib.contextmanager
def runner_alone(config):
    """vllm-ascend's MRV1 in one process, without a distributed environment and a model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    alone = SimpleNamespace(
        world_size=1, rank_in_group=0, rank=0, is_first_rank=True, is_last_rank=True, device_group=None
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_PP", "_TP", "_DCP", "_PCP"):
            patch.setattr(parallel_state, name, alone)
        with set_current_vllm_config(config):
            yield NPUModelRunner(config, torch.device("cpu"))
