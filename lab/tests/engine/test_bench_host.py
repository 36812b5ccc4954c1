"""`bench host` on real engines: recorded tokens come, drafts are accepted, no step beats the device."""

import json
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from rollout_spec.trace import to_line

METHODS = ["off/mrv1", "sam:8/mrv1"]
ALL = ["off/mrv1", "off:sync/mrv1", "sam:0/mrv1", "sam:8/mrv1"]
ON_MRV2 = ["off", "sam:0", "sam:8"]
SECONDS = 0.004


@pytest.mark.skipif(
    not current_platform.is_cpu(), reason="`bench host` needs vLLM for CPUs, and says so elsewhere"
)
@pytest.mark.parametrize(
    "methods",
    [METHODS, ON_MRV2, pytest.param(ALL, marks=pytest.mark.long)],
    ids=["MRV1", "MRV2", "all MRV1"],
)
def test_a_device_made_of_time(
    methods: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rollout_spec_lab.cli import main

    response = [*range(10, 26)] * 6  # repeats, so that there is something to draft from
    trace = tmp_path / "trace.jsonl"
    trace.write_text(to_line("g", None, [5, 6, 7], [response, response[3:]]))
    steps = f"--rows 1 2 --step-ms {1e3 * SECONDS} --warm-up-steps 12 --steps 24 --repeats 1"
    options = [*steps.split(), "--methods", ",".join(methods), "--json", "--output", str(tmp_path)]
    # The worker compares each request's tokens with the recording, and fails where they differ.
    assert main(["bench", "host", str(trace), *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "host.json").read_text())
    on_mrv2 = methods == ON_MRV2
    engines = [record["engines"][method] for method in methods]
    assert {engine["model_runner"] for engine in engines} == {"MRV2" if on_mrv2 else "MRV1"}
    ahead = [method == methods[0] or on_mrv2 for method in methods]
    assert [engine["async_scheduling"] for engine in engines] == ahead

    results = {(row["rows"], row["step"], row["method"]): row for row in record["results"]}
    assert len(results) == 2 * len(methods)
    for (rows, _, method), row in results.items():
        [run] = row["repeats"]
        assert run["num_rows"] == rows and abs(run["num_steps"] - 24) <= 1  # one may be on its way
        at_least = run["num_steps"] * SECONDS * (1 - 1e-9)
        assert row["vllm_ms"] > 0 and (row["drafter_ms"] > 0) == method.startswith("sam")
        assert (run["launch_s"] > 0) == on_mrv2
        assert run["seconds"] >= at_least
        if method in ("off/mrv1", "off", "sam:0"):
            assert run["num_ahead"] > 12
        else:  # MRV2 is ahead until the gate has opened
            waited = 1 - run["num_ahead"] / run["num_steps"]
            assert waited == 1 or (on_mrv2 and waited > 0.5)
            assert run["seconds"] >= at_least + waited * run["host_s"] / 4  # MRV2 schedules meanwhile
        if method.startswith("sam:8"):
            assert run["num_accepted_tokens"] > 12 * rows
            assert run["num_accepted_tokens"] + 24 * rows == run["num_tokens"]
        else:
            assert run["num_tokens"] == 24 * rows and run["num_draft_tokens"] == 0
