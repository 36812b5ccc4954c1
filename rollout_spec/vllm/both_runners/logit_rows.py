"""The rows of logits that a step with our drafter has at most, and the memory that they take."""

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from rollout_spec.config import SpecConfig

logger = init_logger(f"vllm.{__name__}")


def most_logit_rows(vllm_config: VllmConfig, config: SpecConfig) -> int:
    """A row for each request and one for each draft token: so many are profiled, and no step has more."""
    scheduler, k = vllm_config.scheduler_config, config.num_speculative_tokens
    most = scheduler.max_num_seqs + min(config.max_draft_tokens, scheduler.max_num_seqs * k)
    return min(most, scheduler.max_num_batched_tokens)


def log_logit_memory(vllm_config: VllmConfig, config: SpecConfig, masks: Any = None) -> None:
    """Say what these rows take. masks: the tensor that holds grammars' masks of them, if there is one."""
    rows, model = most_logit_rows(vllm_config, config), vllm_config.model_config
    num_logits, size = rows * model.get_vocab_size(), model.dtype.itemsize
    num_copies = 1 + (vllm_config.parallel_config.tensor_parallel_size > 1)  # of this rank, and of all
    logger.info_once(
        "rollout_spec: a step has at most %d rows of logits (max_num_seqs + max_draft_tokens): %.2f GiB, and "
        "%.2f GiB as float32%s; rollout.spec.max_draft_tokens changes that",
        rows, num_copies * num_logits * size / 2**30, num_logits * 4 / 2**30,
        "" if masks is None else f"; grammars' masks of rows take {masks.nbytes / 2**30:.2f} GiB more",
    )  # fmt: skip
