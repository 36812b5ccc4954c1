"""What this package changes in verl, in vLLM's engine as verl starts it, and in uni-agent: a `Patch` each.

They are here so that `doctor` can name them where what they change cannot be imported.
"""

from rollout_spec.patches import Patch

PLAIN_OPTIONS = Patch(
    name="verl-plain-options",
    reason="rollout.spec as a plain value in a YAML file trains without drafts, and nobody says so",
    upstream="verl/utils/device.py, auto_set_device",
    until="verl refuses keys that nobody reads",
)
TRAINER = Patch(
    name="verl-trainer-hooks",
    reason="verl counts drafts for MTP only, names no rows, and its one class of checkpoint callbacks is the "
    "user's own",
    upstream="verl/trainer/ppo/v1/trainer_base.py, PPOTrainer",
    until="verl calls back at the start, at the end of a step, after a validation and before a save",
)
DEATHS = Patch(
    name="verl-watch-servers",
    reason="whoever sends weights or waits for samples waits forever for an engine that has died",
    upstream="verl/checkpoint_engine/base.py, CheckpointEngineManager.update_weights; "
    "verl/trainer/ppo/v1/replay_buffer.py, ReplayBuffer._wait_for_next_poll",
    until="verl gives up a weight sync whose receiver is dead, and a wait for samples that nobody makes",
)
NAMED_SAMPLES = Patch(
    name="verl-named-samples",
    reason="a sample's calls say neither of which row it is, nor its number, nor when it has ended",
    upstream="verl/experimental/agent_loop/agent_loop.py, AgentLoopWorker",
    until="verl's agent loops say which sample a call is of, and when it ends",
)
NAMED_CALLS = Patch(
    name="verl-named-calls",
    reason="all calls of a sample have the same sampling parameters, so no server could tell them apart",
    upstream="verl/workers/rollout/llm_server.py, LLMServerClient",
    until="verl's client says which call of which sample a request is",
)
NAMED_SESSIONS = Patch(
    name="uni-agent-sessions",
    reason="a session's calls say neither of which row it is, nor its number, nor when it has ended",
    upstream="uni_agent/framework/framework.py, OpenAICompatibleAgentFramework._run_session; "
    "uni_agent/gateway/gateway.py, GatewayActor",
    until="uni-agent says which session a call is of, and when it ends",
)
PRIVATE_METHODS = Patch(
    name="verl-private-methods",
    reason="our server overrides methods that verl does not promise",
    upstream="verl/workers/rollout/vllm_rollout/vllm_async_server.py, vLLMHttpServer",
    until="verl has public methods in their place",
)
GROUPED = Patch(
    name="vllm-groups-by-rank",
    reason="vLLM chooses the data-parallel rank with the fewest requests, and so spreads the siblings of a "
    "prompt; used with rollout.spec.routing=group only",
    upstream="vllm/v1/engine/async_llm.py, AsyncLLM.generate",
    until="verl's routers choose ranks, not servers",
)
