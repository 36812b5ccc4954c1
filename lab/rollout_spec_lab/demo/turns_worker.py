"""Two engines in one process that take turns: `python -m rollout_spec_lab.demo.turns_worker JOB RESULT`."""

import dataclasses
import time
from typing import Any

from rollout_spec.vllm.proposing.control import ProposerControl
from rollout_spec.vllm.proposing.proposer import proposer_of
from rollout_spec_lab.bench.engine_worker import Watch, make_engine, rollout, runner_of, settings_of, warm_up
from rollout_spec_lab.bench.jobs import EngineJob, reply
from rollout_spec_lab.demo.turns import METHODS, in_turn


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Serve one pair of rollouts after the other: the same requests without drafts and with them.

    After each pair both engines are told of it as by a weight sync. job: `engine_job`, an EngineJob;
    `pairs`, the requests of each; `seconds`, after which no pair begins, but for the first `least`.
    """
    both = EngineJob(**job["engine_job"])
    engines = {method: make_engine(dataclasses.replace(both, method=method)) for method in METHODS}
    watches = {method: Watch(engine) for method, engine in engines.items()}
    for engine in engines.values():
        warm_up(engine)
        forget(engine)
    pairs: list[dict[str, Any]] = []
    began = time.monotonic()
    for number, requests in enumerate(job["pairs"]):
        if number >= job["least"] and time.monotonic() - began > job["seconds"]:
            break
        of_pair = dataclasses.replace(both, requests=requests)
        pairs.append({m: rollout(engines[m], watches[m], of_pair) for m in in_turn(number)})
        for engine in engines.values():
            forget(engine)
    return {"pairs": pairs, "settings": settings_of(engines[METHODS[1]].vllm_config)}


def forget(engine: Any) -> None:
    """Let an engine forget cached prefixes, and its drafter take in what has ended."""
    engine.reset_prefix_cache()
    if proposer := proposer_of(runner_of(engine)):
        ProposerControl(proposer).note_new_weights()


if __name__ == "__main__":
    reply(run)
