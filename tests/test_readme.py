"""The README's commands are run somewhere; its options, metrics and quoted messages are those of the code.

`python -m tests.test_readme` writes the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from rollout_spec.cli import certify
from rollout_spec.config import AUTO, METHODS, MODES, ROUTINGS, VERIFY, SpecConfig
from rollout_spec.metrics import EngineCounters, RequestCounters, RolloutReport, rollout_metrics

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- options: [^\n]*-->\n).*?(<!-- /options -->)", re.DOTALL)
CHOICES = {"method": METHODS, "mode": MODES, "verify": VERIFY, "routing": ROUTINGS}

# What is run elsewhere than as a line of .ci/run: a file, and the text in it that runs it.
ELSEWHERE = {
    "rollout-spec doctor": ("tests/test_cli.py", 'run("doctor", "--json")'),
    "rollout-spec certify": ("tests/engine/test_certify.py", 'main(["certify", "--model", policy'),
    "rollout-spec bench native": ("tests/test_cli.py", 'run("bench", "native", "--json"'),
    "rollout-spec bench engine": (
        "tests/engine/test_bench.py",
        'main(["bench", "engine", "--model", tiny_model',
    ),
    "make demo": (".ci/run", "make demo DEMO_ARGS=--quick"),
}


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def options_table() -> str:
    lines = ["| `rollout.spec.` | default | range | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(SpecConfig):
        low, high = field.metadata["low"], field.metadata["high"]
        span = ", ".join(CHOICES.get(field.name, ()))
        if not span and low is not None:
            span = f"{_plain(low)} to {_plain(high)}" + (f", {AUTO}" if field.metadata["or_auto"] else "")
        elif not span:
            span = "true, false" if isinstance(field.default, bool) else "a path"
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        default = default or "none"
        lines.append(f"| `{field.name}` | {default} | {span} | {field.metadata['help']} |")
    return "\n".join(lines) + "\n"


def _plain(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def with_table(text: str) -> str:
    return TABLE.sub(lambda match: match[1] + options_table() + match[2], text)


def test_the_readme_shows_commands():
    assert {"make demo", "make test"} <= set(commands())


@pytest.mark.parametrize("command", commands())
def test_every_command_is_run_somewhere(command):
    file, text = ELSEWHERE.get(command, (".ci/run", command))
    assert text in (ROOT / file).read_text()


def test_the_table_of_options_is_that_of_the_code():
    assert TABLE.search(README.read_text())
    assert with_table(README.read_text()) == README.read_text(), "run: python -m tests.test_readme"


def messages() -> list[str]:
    """What the tables of the section on trouble quote."""
    section = re.search(r"## Troubleshooting\n(.*?)\n## ", README.read_text(), re.DOTALL)
    assert section
    rows = [line for line in section[1].splitlines() if line.startswith("| `")]
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row.split("|")[1]) if " " in quoted]


def test_quoted_messages_are_those_of_the_code():
    source = " ".join(path.read_text() for path in (ROOT / "rollout_spec").rglob("*.py"))
    # Messages run over several lines of source.
    joined = re.sub(r'"\s*f?"', "", source)
    found = [message for message in messages() if message in joined]
    # vllm-ascend's own.
    assert set(messages()) - set(found) == {"Unknown speculative decoding method: custom_class"}
    assert len(found) > 6


def test_the_metrics_named_are_those_that_are_logged():
    report = RolloutReport(
        EngineCounters(num_steps=2, num_steps_on=1, gate_seconds=1.0, gate_expected_seconds=1.0),
        [RequestCounters(9, 4, 3, 6, 2)],
        9,
        rollout_seconds=1.0,
    )
    logged = set(rollout_metrics([report, report])) | {
        "rollout/spec_accept_rate",
        "rollout/spec_accept_length",
    }
    named = set(re.findall(r"rollout/spec_\w+", README.read_text()))
    assert named <= logged, named - logged


def test_links_inside_the_repository_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (ROOT / target).exists(), target


def test_every_option_of_certify_is_explained():
    section = README.read_text().split("Are the tokens really the same")[1].split("What would other")[0]
    parser = argparse.ArgumentParser(add_help=False)
    certify.add_arguments(parser)
    for action in parser._actions:
        if action.option_strings != ["--json"]:  # every command has it
            assert f"`{action.option_strings[0]}" in section, action


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
