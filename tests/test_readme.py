"""README and documentation: every command is run somewhere, every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rollout_spec.cli import build_parser
from rollout_spec_lab import cli as lab

PARSERS = {"rollout-spec": build_parser, "rollout-spec-lab": lab.build_parser}
ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted(ROOT.glob("recipes/*/README.md"))
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "DESIGN.md", *sorted((ROOT / "lab").glob("[or]*/*.md"))]

# What is run elsewhere than as a line of .ci/run: a file, and the text in it that runs it.
ELSEWHERE = {
    "rollout-spec-lab bench host outputs/demo/off/rollouts/rollouts-0.jsonl --rows 8 64 --step-ms 20": (
        "lab/tests/engine/test_bench_host.py",
        'main(["bench", "host", str(trace)',
    ),
    "rollout-spec replay rollout_data --tokenizer Qwen3-8B --output outputs/replay": (
        "tests/test_dumps.py",
        'main(["replay", str(dump), "--tokenizer", str(tokenizer), "--output", str(output)])',
    ),
    "rollout-spec doctor": ("tests/test_doctor.py", 'doctor("pass", "--json")'),
    "rollout-spec certify --model outputs/demo/model": (
        "tests/engine/test_certify.py",
        'main(["certify", *arguments])',
    ),
    "rollout-spec-lab bench native": ("lab/tests/test_cli.py", 'run("bench", "native", "--json"'),
    "rollout-spec-lab bench engine": (
        "lab/tests/engine/test_bench.py",
        'main(["bench", "engine", "--model", tiny_model',
    ),
    "rollout-spec-lab bench verify --device cpu --rows 8 --drafts 7": (
        "lab/tests/engine/test_offline.py",
        "bench verify --device cpu",
    ),
    "rollout-spec-lab gpu-check": (
        "lab/tests/engine/test_gpu_check.py",
        'main(["gpu-check", "--model", chat_model',
    ),
    "make demo": (".ci/run", "make demo DEMO_ARGS=--quick"),
}


def lines_of(page: Path, language: str) -> list[str]:
    """The commands in a page's blocks of one language; a backslash goes on with the next line."""
    blocks = re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]


def commands() -> list[str]:
    return sorted({line for page in PAGES for line in lines_of(page, "bash")})


def text_of(file: str) -> str:
    """A file's text; of a script with what its variables stand for."""
    text = (ROOT / file).read_text()
    variables = re.findall(r"(?:^| )(\w+)=((?:outputs|\$\w+)/\S+)", text, re.MULTILINE)
    for name, value in reversed(variables):  # the later ones are made of the earlier
        text = text.replace(f"${name}", value)
    return text


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("command", commands())
def test_every_command_is_run_somewhere(command):
    file, text = ELSEWHERE.get(command, (".ci/run", command))
    assert text in text_of(file)


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=name_of)
def test_every_example_has_arguments_that_exist(page):
    for line in lines_of(page, "(?:ba)?sh"):
        command, *arguments = shlex.split(line, comments=True) or [""]
        if command in PARSERS:
            PARSERS[command]().parse_args(arguments)  # exits where it cannot


def anchors_of(page: Path) -> set[str]:
    """Of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RECIPES, *OTHERS], ids=name_of)
def test_links_inside_the_repository_lead_somewhere(page):
    for name, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text()):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors_of(target), f"{name}#{anchor}"
