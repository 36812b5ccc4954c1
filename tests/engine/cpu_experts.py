"""The worker extension of several engine cores; it brings what experts need and vLLM's CPU engine lacks."""

import tests.engine.cpu_activation
import tests.engine.cpu_collectives  # noqa: F401
from rollout_spec.verl.worker_extension import SpecWorkerExtension


class Extension(SpecWorkerExtension):
    def last_step_of_the_ranks(self):
        work = self.model_runner.drafter.busiest_work
        return work.number, work.num_tokens

    def pass_the_drafter_by(self):
        self.model_runner.effective_drafter_max_model_len = 0
