"""Hands the engine's batch to the drafter, step by step, and the drafts back. An adapter, no algorithm."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from vllm.logger import init_logger

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.drafts import TAKES_ANY, Drafts, ModelDrafts, NextStep, StepsToCome
from rollout_spec.drafting.gate.step import Work
from rollout_spec.drafting.native import Int32Array, NativeError
from rollout_spec.metrics import EngineCounters
from rollout_spec.patches import temporarily
from rollout_spec.vllm.both_runners.cuda_graphs import pads_drafts
from rollout_spec.vllm.options import drafts_with_model
from rollout_spec.vllm.proposing.kept_counters import KeptCounters
from rollout_spec.vllm.proposing.live_requests import Batch, LiveRequests
from rollout_spec.vllm.proposing.other_ranks import OtherRanks

logger = init_logger(f"vllm.{__name__}")


class BatchProposer:
    """What drafts for the rows of a model runner; on MRV1 vLLM asks it as it asks its own.

    Args:
        runner: vLLM's, before it loads its model.
        batch: of its requests, with MRV2; None: the runner itself is one.
        index_arrivals: indexes what has been sampled and is still on its way: with MRV2 a step or two.
    """

    def __init__(
        self, runner: Any, config: SpecConfig, batch: Batch | None = None,
        index_arrivals: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._runner, self._batch = runner, runner if batch is None else batch
        self.config, self.index_arrivals = config, index_arrivals
        # vLLM's scheduler takes the drafts of the first tensor-parallel rank of an engine core; the others
        # get them back from it. Data-parallel ranks are engine cores of their own. With an external launcher
        # every worker has a scheduler, which must decide as the others' do.
        parallel = runner.vllm_config.parallel_config
        has_one_scheduler = parallel.distributed_executor_backend in ("mp", "ray", "uni")
        self.drafts_here = not has_one_scheduler or parallel.rank % parallel.tensor_parallel_size == 0
        # The most that a model drafts for a row beside the text; 0: there is no model.
        self.most_model_tokens = config.most_model_tokens if drafts_with_model(runner.vllm_config) else 0
        self.drafter = self.new_drafter()  # None: not `drafts_here`, or it has failed
        self.is_warming_up = False
        self.requests = LiveRequests()
        self._counters = KeptCounters()
        self._other_ranks = OtherRanks(runner)
        self._own_work: Work | None = None  # of the step that runs
        if self.drafts_here:
            logger.info("rollout_spec: drafting is active in this engine: %s", config.to_dict())
            if parallel.data_parallel_size > 1:
                self._other_ranks.watch()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """In here nothing is drafted, learned or counted: vLLM warms up, with requests of its own."""
        with temporarily(self, "is_warming_up", True):
            yield
            self.index_arrivals()  # whose steps are of the warm-up

    @property
    def to_come(self) -> StepsToCome:
        """What the last call of `draft` wants."""
        return StepsToCome() if self.drafter is None else self.drafter.to_come

    def new_drafter(self) -> Drafter | None:
        """A drafter that has seen nothing, where this worker is to have one."""
        if not self.drafts_here:
            return None
        vllm_config = self._runner.vllm_config
        return Drafter(
            self.config, pads_drafts=pads_drafts(vllm_config), most_model_tokens=self.most_model_tokens,
            vocab_size=vllm_config.model_config.get_vocab_size(),
        )  # fmt: skip

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load, nor to run without requests, as vllm-ascend asks by `dummy_run`."""

    dummy_run = load_model

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Int32Array, token_ids_cpu: Int32Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:  # fmt: skip
        """Draft for every row of the step. Never raises: a failure costs the step's drafts, not the rollout.

        sampled_token_ids: the tokens each row got in this step; none for a partial prefill.
        num_tokens_no_spec: int32 [max_num_reqs], tokens of each row, draft tokens excluded.
        token_ids_cpu: int32 [max_num_reqs, max_model_len], the tokens of each row.
        """
        nums = np.array(list(map(len, sampled_token_ids)), np.int32)
        return self.draft(nums, token_ids_cpu, num_tokens_no_spec, self.busiest_work).lists()

    def note_scheduled(self, scheduler_output: Any, has_waited: bool = False) -> None:
        """A step begins with this output of the scheduler; has_waited: for its drafts, if there are some."""
        nums, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        num_tokens, num_drafts = scheduler_output.total_num_scheduled_tokens, sum(map(len, drafts.values()))
        num_prompt_tokens = num_tokens - num_drafts - len(nums)
        self._own_work = Work(num_tokens, num_prompt_tokens, has_waited or num_drafts > 0)

    @property
    def busiest_work(self) -> Work | None:
        """What the step that runs processes, on the busiest rank; None: nobody has noted it."""
        return self._other_ranks.of_busiest(self._own_work)

    def draft(
        self, nums_new: Int32Array, token_ids: Any, levels: Int32Array, work: Work | None,
        model_drafts: ModelDrafts | None = None, next_step: NextStep = TAKES_ANY, may_end: bool = True,
        ended: float | None = None,
    ) -> Drafts:  # fmt: skip
        """`Drafter.draft` for the runner's rows. As `propose` it never raises.

        may_end: False where no token of the step ends a request, which saves a look at all rows.
        """
        if self.is_warming_up:
            return Drafts.none(len(nums_new))
        try:
            if self.drafter is not None:
                self.requests.update(self.drafter, self._batch, self._runner.max_model_len)
                request_ids: list[str] = self._batch.input_batch.req_ids
                if may_end:
                    nums_new, levels = self.requests.until_ends(request_ids, nums_new, token_ids, levels)
                rows = request_ids, nums_new, token_ids, levels
                drafts = self.drafter.draft(*rows, work, model_drafts, next_step, ended)
                self._counters.log(self.drafter)
                return drafts
            if self.drafts_here:
                self._counters.count_failed_step()
        except NativeError as error:  # the index is as it was before the step
            self._counters.count_failed_step()
            self._counters.warn("step", f"this step goes without drafts: {error}")
        except Exception as error:
            self.fail(error)
        return Drafts.none(len(nums_new))

    def fail(self, error: Exception) -> None:
        """End drafting for the rest of the engine's life: generation goes on without."""
        self._counters.keep(self.drafter)
        self.drafter = None
        self._counters.count_failed_step()
        self._counters.warn("engine", f"drafting is off for the rest of this engine's life: {error!r}")

    def note_passes(self, num: int) -> None:
        """A model has drafted beside our drafter, in so many passes of those that it can take."""
        if self.drafter is not None and not self.is_warming_up:
            self.drafter.counters.num_model_passes += num
            self.drafter.counters.num_model_passes_left_out += self.most_model_tokens - num

    def catch_up(self, has_time: Callable[[], bool]) -> None:
        """Index unindexed text, while the device works and there is time."""
        try:
            if self.drafter is not None:
                self.drafter.catch_up(has_time)
        except Exception as error:
            self.fail(error)

    def take_counters(self) -> EngineCounters:
        """The counts since the last call, also those of steps whose tokens are on their way."""
        self.index_arrivals()
        return self._counters.take(self.drafter)


def proposer_of(runner: Any) -> BatchProposer | None:
    """The proposer of a model runner, once the plugin has bound it; None: the engine has none."""
    return getattr(runner, "rollout_spec_proposer", None)
