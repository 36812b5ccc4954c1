"""Runs of two steps or more, as a training leaves them, and two compared."""

import json

from rollout_spec.report.measures import compare
from rollout_spec.report.runs import read_run

SPEC = "rollout/spec_"


def write_run(folder, seconds, tokens, drafts=False, responses=(), training=20.0, waited=None, interrupted=0):
    folder.mkdir(parents=True, exist_ok=True)
    lines, trained = [], training if isinstance(training, list) else [training] * len(seconds)
    for step, (took, generated) in enumerate(zip(seconds, tokens, strict=True), 1):
        data = {
            SPEC + "rollout_seconds": took, SPEC + "generated_tokens": generated,
            SPEC + "num_interrupted": interrupted,
            "critic/rewards/mean": 0.1 * step, "response_length/mean": generated / 16,
            "actor/entropy": 1.0 - 0.1 * step, "perf/total_num_tokens": 2000,
            "timing_s/gen": took + 1.0 if waited is None else waited,
            "timing_s/old_log_prob": 0.25 * trained[step - 1],
            "timing_s/update_actor": 0.75 * trained[step - 1],
            "timing_s/step": took + trained[step - 1],
        }  # fmt: skip
        if drafts:
            data |= {
                SPEC + "tokens_per_step": 2.0 if step == 1 else 4.0, SPEC + "num_failed_steps": 0,
                SPEC + "num_drafts": 10, SPEC + "num_draft_tokens": 40 * step,
                SPEC + "num_accepted_tokens": 20, SPEC + "draft_ms": 0.1 * step,
            }  # fmt: skip
        lines.append(json.dumps({"step": step, "data": data}))
    # Validation logs under the same step, without rollout times.
    lines.insert(0, json.dumps({"step": 0, "data": {"val-core/demo/reward/mean@1": 0.5}}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if responses:
        trace = {"group": "a", "step": 1, "prompt_token_ids": [1], "responses": responses}
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "engine0.jsonl").write_text(json.dumps(trace) + "\n")
    return folder


def compared(folder, off, sam, tokens=None, sam_tokens=None, **settings):
    tokens = tokens or [100] * len(off)
    write_run(folder / "off", off, tokens)
    write_run(folder / "sam", sam, sam_tokens or tokens, True, **settings)
    return compare(*(read_run(folder / name, name) for name in ("off", "sam")))
