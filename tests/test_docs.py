"""The documentation says what the code says: options, metrics, arguments, messages."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from docs.generate import DOCS, PART, renewed
from rollout_spec.cli import build_parser
from rollout_spec.config import SpecConfig
from rollout_spec.metrics import (
    METRICS,
    PREFIX,
    EngineCounters,
    RequestCounters,
    RolloutReport,
    rollout_metrics,
)
from rollout_spec.verl.model_drafter import OPTION
from rollout_spec_lab import cli as lab

ROOT = Path(__file__).parents[1]
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", *PAGES, *sorted(ROOT.glob("recipes/*/README.md"))]
OF_VERL = {PREFIX + "accept_rate", PREFIX + "accept_length"}


def logged() -> set[str]:
    report = RolloutReport(
        EngineCounters(
            num_steps=2, num_steps_on=1, gate_seconds=1.0, gate_expected_seconds=1.0,
            num_draft_tokens=2, num_model_passes=1, num_model_draft_tokens=1,
        ),
        [RequestCounters(9, 4, 3, 6, 2)],
        9,
        rollout_seconds=1.0,
    )  # fmt: skip
    return set(rollout_metrics([report, report]))


def test_what_comes_from_the_code_is_up_to_date():
    stale = [page.name for page in PAGES if renewed(page.read_text()) != page.read_text()]
    assert not stale, "run: python -m docs.generate"


def leaves(parser: argparse.ArgumentParser, name: str = "") -> set[str]:
    """The commands below this one, without the program's name."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return {name}
    return {leaf for key, sub in below[0].choices.items() for leaf in leaves(sub, f"{name} {key}".strip())}


def test_every_command_has_its_arguments_on_a_page():
    parts = {part[1] for page in PAGES for part in PART.findall(page.read_text())}
    shown = {part.removeprefix("arguments ") for part in parts if part.startswith("arguments ")}
    assert shown == leaves(build_parser()) | leaves(lab.build_parser())


def test_every_metric_that_is_logged_is_explained_once():
    names = [PREFIX + metric.name for metric in METRICS]
    assert sorted(names) == sorted(logged() | OF_VERL)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_metrics_and_options_that_are_named_exist(page):
    text = page.read_text()
    metrics = set(re.findall(r"rollout/spec_[a-z_]+", text)) - {PREFIX}
    assert metrics <= logged() | OF_VERL, metrics - logged()
    options = set(re.findall(r"rollout\.spec\.([a-z_]+)", text))
    assert options <= {field.name for field in dataclasses.fields(SpecConfig)} | {OPTION}, options


def messages() -> list[str]:
    """What the tables of the page on trouble quote."""
    rows = [line for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row.split("|")[1]) if " " in quoted]


def test_quoted_messages_are_those_of_the_code():
    folders = (ROOT / "rollout_spec", ROOT / "lab/rollout_spec_lab")
    source = " ".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    # Messages run over several lines of source.
    joined = re.sub(r'"\s*f?"', "", source)
    found = [message for message in messages() if message in joined]
    foreign = {"unexpected keyword argument 'flush'"}  # verl's own
    assert set(messages()) - set(found) == foreign


def test_the_menu_has_every_page():
    menu = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(menu) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)
