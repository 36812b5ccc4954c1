"""The documentation names what the code has: options, metrics, arguments; its links lead somewhere."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from docs.generate import DOCS, PAGES, PART, renewed
from rollout_spec import metrics
from rollout_spec.cli import build_parser
from rollout_spec.config import SpecConfig
from rollout_spec.verl.model_drafter import OPTION
from rollout_spec_lab import cli as lab
from tests.distributions import parsers

ROOT = Path(__file__).parents[1]

TEXTS = [ROOT / "README.md", *PAGES, *sorted(ROOT.glob("recipes/*/README.md"))]
PARSERS = {"rollout-spec": build_parser(), "rollout-spec-lab": lab.build_parser()}
COUNTERS = metrics.EngineCounters(
    num_steps=2, num_steps_on=1, num_row_steps=2, num_draft_tokens=2, num_timed_steps=1, timed_seconds=1.0,
    num_drafted_steps=1, drafted_seconds=1.0, num_model_passes=1, num_model_draft_tokens=1,
)  # fmt: skip
REPORT = metrics.RolloutReport(COUNTERS, metrics.RequestCounters(9, 4, 3, 6, 2), 9, rollout_seconds=1.0)
LOGGED = metrics.rollout_metrics([REPORT, REPORT]).keys()


def test_what_comes_from_the_code_is_up_to_date():
    stale = [page.name for page in PAGES if renewed(page.read_text()) != page.read_text()]
    assert not stale, "run: python -m docs.generate"


def test_every_command_has_its_arguments_on_a_page_and_every_metric_its_line():
    parts = {part[1] for page in PAGES for part in PART.findall(page.read_text())}
    shown = {part.removeprefix("arguments ") for part in parts if part.startswith("arguments ")}
    commands = {name for top, parser in PARSERS.items() for name, _ in parsers(parser, top)}
    assert shown == {name for name in commands if not any(other.startswith(f"{name} ") for other in commands)}
    assert sorted(metrics.PREFIX + metric.name for metric in metrics.METRICS) == sorted(LOGGED)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_metrics_and_options_that_are_named_exist(page):
    text = page.read_text()
    named = set(re.findall(r"rollout/spec_[a-z_]+", text)) - {metrics.PREFIX}
    assert named <= LOGGED | {f"{metrics.PREFIX}accept_{name}" for name in ("rate", "length")}, named - LOGGED
    options = set(re.findall(r"rollout\.spec\.([a-z_]+)", text))
    assert options <= {field.name for field in dataclasses.fields(SpecConfig)} | {OPTION}, options


def test_the_menu_has_every_page():
    menu = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(menu) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_example_has_arguments_that_exist(page):
    blocks = "\n".join(re.findall(r"```(?:ba)?sh\n(.*?)```", page.read_text(), re.DOTALL))
    for line in blocks.replace("\\\n", " ").splitlines():
        command, *arguments = shlex.split(line, comments=True) or [""]
        if command in PARSERS:
            PARSERS[command].parse_args(arguments)  # exits where it cannot


def anchors_of(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "DESIGN.md", *sorted((ROOT / "lab").glob("*/*.md"))]


@pytest.mark.parametrize("page", [*TEXTS, *OTHERS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_inside_the_repository_lead_somewhere(page):
    for name, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text()):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors_of(target), f"{name}#{anchor}"
