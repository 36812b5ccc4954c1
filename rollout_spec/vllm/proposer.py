"""vLLM's custom proposer: hands the engine's batch to the drafter, step by step. An adapter, no algorithm."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.drafts import TAKES_ANY, Drafts, NextStep
from rollout_spec.drafting.gate.step import Work
from rollout_spec.drafting.native import Int32Array, NativeError
from rollout_spec.metrics import EngineCounters
from rollout_spec.patches import temporarily
from rollout_spec.vllm.cuda_graphs import pads_drafts
from rollout_spec.vllm.kept_counters import KeptCounters
from rollout_spec.vllm.live_requests import LiveRequests
from rollout_spec.vllm.options import drafts_with_model
from rollout_spec.vllm.other_ranks import OtherRanks

logger = init_logger(f"vllm.{__name__}")


class SuffixProposer:
    """The class that `speculative_config={"method": "custom_class", "model": PROPOSER, ...}` names.

    Its options are `additional_config["rollout_spec"]`, the fields of `SpecConfig`; the number of draft
    tokens is vLLM's `num_speculative_tokens`. What a request says of itself: see `keys`.

    Of an engine core's workers only the one whose drafts the scheduler takes has a drafter: `drafts_here`.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        # vLLM's scheduler takes the drafts of the first tensor-parallel rank of an engine core; the others
        # get them back from it. Data-parallel ranks are engine cores of their own. With an external launcher
        # every worker has a scheduler, which must decide as the others' do.
        parallel = vllm_config.parallel_config
        has_one_scheduler = parallel.distributed_executor_backend in ("mp", "ray", "uni")
        self.drafts_here = not has_one_scheduler or parallel.rank % parallel.tensor_parallel_size == 0
        self.drafter: Drafter | None = None  # None before `bind`, if not `drafts_here`, or if it has failed
        self._other_ranks = OtherRanks(vllm_config)
        self._work: Work | None = None
        self._runner: Any = None  # MRV1, or `HostBatch` in the place of MRV2; once there is one
        self.config = SpecConfig()
        self.index_arrivals: Callable[[], object] = lambda: None
        # The most that a model drafts for a row beside the text; 0: there is no model.
        self.most_model_tokens = 0
        self.requests = LiveRequests()
        self._counters = KeptCounters()

    def bind(
        self, runner: Any, config: SpecConfig, index_arrivals: Callable[[], object] = lambda: None
    ) -> None:
        """Give the proposer what vLLM does not (`plugin`); once, before the engine loads its model.

        index_arrivals: indexes what has been sampled and is still on its way: with MRV2 a step or two.
        """
        self._runner, self.config, self.index_arrivals = runner, config, index_arrivals
        self.most_model_tokens = config.most_model_tokens if drafts_with_model(self._vllm_config) else 0
        self.drafter = self.new_drafter()
        if self.drafts_here:
            logger.info("rollout_spec: drafting is active in this engine: %s", config.to_dict())
            if runner.parallel_config.data_parallel_size > 1:
                self._other_ranks.watch(runner)

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load; the last moment before serving to see that the plugin has run."""
        if self._runner is None:
            raise RuntimeError(
                "rollout_spec: vLLM did not load the plugin 'rollout_spec' in this process, so the drafter "
                "does not know the requests of its rows. Let VLLM_PLUGINS name it or leave that variable "
                "unset, and run `rollout-spec doctor`."
            )

    @contextlib.contextmanager
    def without_drafter(self) -> Iterator[None]:
        """In here nothing is drafted, learned or counted: vLLM warms up, with requests of its own."""
        with temporarily(self, "drafter", None):
            yield
            self.take_counters()

    def new_drafter(self) -> Drafter | None:
        if not self.drafts_here:
            return None
        return Drafter(
            self.config, pads_drafts=pads_drafts(self._vllm_config), most_model_tokens=self.most_model_tokens,
            vocab_size=self._vllm_config.model_config.get_vocab_size(),
        )  # fmt: skip

    def dummy_run(self, *_: Any, **__: Any) -> None:
        """vllm-ascend runs a drafter's model where it runs the target's without requests; there is none."""

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
        return self.draft(nums, token_ids_cpu, num_tokens_no_spec, self.work).lists()

    def note_work(self, scheduler_output: Any, has_waited: bool = False) -> None:
        """A step begins with this output of the scheduler; has_waited: for its drafts, if there are some."""
        nums, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        num_tokens, num_drafts = scheduler_output.total_num_scheduled_tokens, sum(map(len, drafts.values()))
        self._work = Work(num_tokens, num_tokens - num_drafts - len(nums), has_waited or num_drafts > 0)

    @property
    def work(self) -> Work | None:
        """What the step that runs processes, on the busiest rank; None: nobody has noted it."""
        return self._other_ranks.of_busiest(self._work)

    def draft(
        self, nums_new: Int32Array, token_ids: Any, levels: Int32Array, work: Work | None,
        next_step: NextStep = TAKES_ANY, may_end: bool = True, ended: float | None = None,
    ) -> Drafts:  # fmt: skip
        """`Drafter.draft` for the runner's rows. As `propose` it never raises.

        may_end: False where no token of the step ends a request, which saves a look at all rows.
        """
        try:
            if self.drafter is not None:
                self.requests.update(self.drafter, self._runner)
                request_ids: list[str] = self._runner.input_batch.req_ids
                if may_end:
                    nums_new, levels = self.requests.until_ends(request_ids, nums_new, token_ids, levels)
                drafts = self.drafter.draft(request_ids, nums_new, token_ids, levels, work, next_step, ended)
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
        if self.drafter is not None:
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


def proposer_of(runner: Any) -> SuffixProposer | None:
    """The proposer of a model runner, once it is bound; None: the engine has none."""
    return getattr(runner, "rollout_spec_proposer", None)
