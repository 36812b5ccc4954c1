"""The order of requests from event to event, beside the simulation that runs every step."""

from pathlib import Path

import pytest

from rollout_spec_lab.studies.order import Load, makespan, measured, requests_for
from rollout_spec.config import SpecConfig
from rollout_spec.predict.roofline import DEVICES, Model, Roofline
from rollout_spec.predict.simulate import Engine, Request, assign, rollout
from rollout_spec.trace import read_trace

ROOT = Path(__file__).parents[1]


def roofline(config: str, tp: int, stretch: float) -> Roofline:
    return Roofline(Model.read(ROOT / "recipes/models" / config), DEVICES["h100"], tp, stretch=stretch)


@pytest.mark.parametrize("stretch", [100.0, 2000.0])  # the KV cache holds all rows; it holds a part of them
def test_events_give_the_makespan_of_every_step(stretch: float) -> None:
    recording = list(read_trace(ROOT / "tests/data/policy_trace.jsonl.gz"))
    lines = {line.group: line for line in recording if line.step == 2}
    times = roofline("qwen3_8b.json", 1, stretch)
    requests = requests_for(measured(recording), 64, seed=0)
    whole = []
    for request in requests:
        line = lines[request.group.split("/")[0]]
        response = line.responses[int(request.name.rsplit(".", 1)[1])]
        whole.append(Request(request.name, request.group, line.prompt_token_ids, response))
    engines = [Engine(SpecConfig(method="off"), times, 16, 8, times.kv_tokens) for _ in range(2)]
    seconds = rollout([[engine] for engine in engines], [[part] for part in assign(whole, 2, False)])
    assert (sum(engine.total.num_preemptions for engine in engines) > 0) == (stretch == 2000.0)
    assert makespan(requests, Load(times, 16, 2, drafts=False)) == pytest.approx(seconds, rel=0.01)
