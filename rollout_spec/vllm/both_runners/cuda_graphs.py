"""Which steps of an engine with our drafter have full CUDA graphs.

With speculation vLLM captures its full graphs for steps in which every row has K draft tokens. Our drafter
chooses how many a row has, so its steps are seldom such, and a plain step would go piece by piece. So
`mrv1.runner` and `mrv2.graphs` capture full graphs for plain steps, as an engine without a drafter has them.
Steps with drafts have piecewise ones; on MRV2 they have full ones too. On NPUs it stays as it is, and for
policies with layers of Mamba 2, whose metadata is captured for K draft tokens in every row only.
"""

from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from rollout_spec import recurrent


def pads_drafts(vllm_config: VllmConfig) -> bool:
    """Whether only steps in which every row has K draft tokens have a graph.

    With vllm-ascend's FULL_DECODE_ONLY: it keeps a graph's parameters by its number of tokens, so graphs of
    plain steps have no place beside those.
    """
    if not current_platform.is_out_of_tree():
        return False
    return vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


def has_plain_graphs(runner: Any) -> bool:
    """False for layers of Mamba 2."""
    model = runner.vllm_config.model_config
    return not (model.is_hybrid and recurrent.has_mamba_2(model.architecture))
