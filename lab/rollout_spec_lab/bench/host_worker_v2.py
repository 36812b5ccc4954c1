"""`host_worker` with MRV2: `python -m rollout_spec_lab.bench.host_worker_v2 JOB RESULT`."""

# ruff: noqa: E402, I001 (vLLM looks for Triton where it is imported)
import rollout_spec_lab.bench.triton_on_cpu  # noqa: F401

from triton.runtime.interpreter import InterpretedFunction

# Also while the engine is made, which runs kernels to see what they take.
InterpretedFunction.run = lambda *_, **__: None

from rollout_spec_lab.bench.jobs import reply
from rollout_spec_lab.bench.host_worker import run

if __name__ == "__main__":
    reply(run)
