"""Whole rollouts on a cluster of simulated engines."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.history import History
from rollout_spec.predict.engine import Cluster, Engine, EngineRun, SimulatedModel, step_together
from rollout_spec.predict.load import Request, assign, requests_of, rollouts_of
from rollout_spec.predict.step_times import Times
from rollout_spec.trace import Rollout


class Simulated(NamedTuple):
    """What is served, and by what engines."""

    lines: Sequence[Rollout]  # with the model's drafts, if there is one
    times: Times
    nums_speculative_tokens: Sequence[int]
    model: SimulatedModel | None = None
    num_ranks: int = 1  # of each engine


def configurations(
    options: Mapping[str, Any], thresholds: Sequence[int | str], ks: Sequence[int]
) -> list[SpecConfig]:
    """Without drafts, then every threshold with every K; `options`: of `rollout.spec`, besides these two.
    They are the first one's too, for all place requests alike.

    Raises UserError: an option's value is wrong.
    """
    configs = [SpecConfig.from_mapping({**options, "method": "off"})]
    for threshold, k in itertools.product(thresholds, ks):
        fixed = {"batch_threshold": threshold, "num_speculative_tokens": k}
        configs.append(SpecConfig.from_mapping({**options, **fixed}))
    return configs


def simulate_each(
    served: Simulated,
    cluster: Cluster,
    configs: Sequence[SpecConfig],
    progress: Callable[[str, int], AbstractContextManager[Callable[[int], None]]],
) -> dict[str, Any]:
    """One cluster with each configuration, the first of which has no drafts; then again with the model.

    progress: of a title and a number of tokens: gives what is told how many were served.

    Returns the cluster, the best configuration, and runs: the settings of each, what `simulate` says, and its
    speedup over the first.
    """
    lines, model, runs = served.lines, served.model, []
    num_tokens = sum(num for line in lines for num in line.num_generated[: cluster.group_size])
    for drafter, config in itertools.product((None, model) if model else (None,), configs):
        threshold = config.batch_threshold if config.enabled else "off"
        name = "+".join([*(["sam"] if config.enabled else []), *(["model"] if drafter else [])]) or "off"
        title = f"{cluster.num_replicas} x {cluster.max_num_seqs} rows, {name} {threshold}"
        with progress(title, num_tokens) as advance:
            figures = simulate(lines, cluster, config, served.times, on_tokens=advance, model=drafter)
        k = config.num_speculative_tokens if config.enabled else None
        setting = {"drafter": name, "batch_threshold": threshold, "num_speculative_tokens": k}
        runs.append({**setting, **figures})
    for figures in runs:
        figures["speedup"] = runs[0]["makespan_s"] / figures["makespan_s"]
    best = min(runs, key=lambda figures: figures["makespan_s"])
    return {
        "replicas": cluster.num_replicas,
        "max_num_seqs": cluster.max_num_seqs,
        "group_size": cluster.group_size,
        "best_drafter": best["drafter"],
        "best_threshold": best["batch_threshold"],
        "best_num_speculative_tokens": best["num_speculative_tokens"],
        "runs": runs,
    }


def simulate(
    lines: Sequence[Rollout],
    cluster: Cluster,
    config: SpecConfig,
    times: Times,
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
    model: SimulatedModel | None = None,
    template: Callable[[Request], Request] | None = None,
) -> dict[str, Any]:
    """The rollouts of a recording on a cluster, one after the other; each ends with its slowest replica.

    After each rollout the replicas exchange their histories, as verl's do, if config.history is above 0.

    Args:
        lines: at least one response must have a token.
        on_tokens: called with the number of tokens of each step.
        template: gives what is served in the place of a request.

    Returns:
        makespan_s, of all rollouts; tail_share, of the time that engines work, with at most TAIL_ROWS
        requests running (in a data-parallel rank); tokens_per_s; tokens_per_step, of one request;
        acceptance_rate (0 without drafts); num_preemptions.
    """
    times = times if config.enabled else times.without_drafter
    num_ranks = cluster.num_ranks
    engines = [Engine(config, times, cluster, model) for _ in range(cluster.num_replicas * num_ranks)]
    replicas = [engines[i : i + num_ranks] for i in range(0, len(engines), num_ranks)]
    makespan = 0.0
    for lines_of_step in rollouts_of(lines):
        requests = requests_of(lines_of_step, cluster.group_size)
        served = [*map(template, requests)] if template else requests
        parts = assign(served, len(engines), config.max_imbalance)
        makespan += rollout(replicas, parts, on_tokens)
        if config.history:
            _share_history([engine.drafter.history for engine in engines if engine.drafter is not None])
    total = EngineRun.sum(engine.total for engine in engines)
    return {
        "makespan_s": makespan,
        "tail_share": total.tail_seconds / total.busy_seconds,
        "tokens_per_s": total.num_tokens / makespan,
        "tokens_per_step": total.num_tokens / total.num_row_steps,
        "acceptance_rate": total.num_accepted_tokens / max(1, total.num_draft_tokens),
        "num_preemptions": total.num_preemptions,
    }


def rollout(
    replicas: Sequence[Sequence[Engine]],
    parts: Sequence[Sequence[Request]],
    on_tokens: Callable[[int], None] = lambda num_tokens: None,
) -> float:
    """Serve the requests of one training step; returns the seconds until the slowest replica has served its.

    replicas: the ranks of each. All ranks of a replica step while one of them has work.
    parts: the requests of each rank, the first replica's ranks first.
    on_tokens: as in `simulate`.
    """
    engines = list(itertools.chain.from_iterable(replicas))
    begins = [rank.now for rank in engines]
    for rank, part in zip(engines, parts, strict=True):
        rank.enqueue(part)
    for ranks in replicas:  # one after the other: none waits for another
        while any(rank.next_time() is not None for rank in ranks):
            on_tokens(step_together(ranks))
    for rank in engines:
        if rank.drafter is not None:
            rank.drafter.note_new_weights()
    return max(rank.now - begin for rank, begin in zip(engines, begins, strict=True))


def _share_history(histories: Sequence[History]) -> None:
    taken = [list(history.take_new()) for history in histories]
    for i, history in enumerate(histories):
        for content in itertools.chain.from_iterable(taken[:i] + taken[i + 1 :]):
            history.merge(content)
