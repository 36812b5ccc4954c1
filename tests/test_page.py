"""The pages as a browser shows them: Debian's chromium, headless.

Without chromium these tests are left out, unless ROLLOUT_SPEC_NEEDS_BROWSER is set, as .ci/run does:
then they fail.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollout_spec.cli import main
from rollout_spec.report.page import COLOURS, write_report
from rollout_spec.report.runs import MEASURES, Comparison, compare, read_run
from rollout_spec.trace import to_line
from tests.test_report import write_run

WIDTH, HEIGHT = 1200, 4800
NARROW = 500  # the narrowest window that chromium opens
NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "no chromium here; install it: apt-get install chromium"

# What the browser made of the page, written into it by the browser itself.
PROBE = """
<script>
addEventListener("load", () => {
  const box = (element) => {
    const rect = element.getBoundingClientRect();
    return [rect.left, rect.top, rect.right, rect.bottom];
  };
  const found = {
    charts: [...document.images].map((image) => ({
      id: image.id, alt: image.alt, width: image.naturalWidth, complete: image.complete, box: box(image) })),
    cells: [...document.querySelectorAll("#measures tbody tr")].map((row) =>
      [...row.cells].map((cell) => cell.innerText)),
    headline: document.querySelector("h1").innerText,
    colour: getComputedStyle(document.querySelector("h1")).color,
    steps: document.querySelectorAll(".steps tbody tr").length,
    overflow: document.documentElement.scrollWidth - innerWidth,
  };
  const probe = document.createElement("pre");
  probe.id = "probe";
  probe.textContent = JSON.stringify(found);
  document.body.append(probe);
});
</script>
"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("ROLLOUT_SPEC_NEEDS_BROWSER"):
        pytest.fail(INSTALL)
    if found is None:
        pytest.skip(INSTALL)
    return found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("page")
    off = write_run(folder / "off", [10.0, 20.0, 10.0, 12.0], [1000, 2000, 1000, 1100])
    on = write_run(folder / "on", [5.0, 10.0, 6.0, 6.0], [1000, 1800, 1200, 1100], True)
    return compare(read_run(off, "off"), read_run(on, "sam"))


@pytest.fixture(scope="module")
def page(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(comparison, tmp_path_factory.mktemp("report"), {"Model": "a <small> one"})["html"]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `replay`; a step of 19 digits makes a table wider than a narrow window."""
    folder = tmp_path_factory.mktemp("replayed")
    trace = folder / "trace.jsonl"
    trace.write_text("".join(to_line("a", step, [1, 2], [[1, 2] * 9, [3]]) for step in (1, 2**62)))
    assert main(["replay", str(trace), "--output", str(folder)]) == 0
    return folder / "replay.html"


def browse(chromium: str, page: Path, folder: Path, *arguments: str, width: int = WIDTH) -> str:
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},{HEIGHT}",
        *arguments,
        page.as_uri(),
    ]
    env = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def probe(chromium: str, page: Path, folder: Path, width: int = WIDTH) -> dict[str, Any]:
    """What the page says of itself once it has been laid out."""
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    dom = browse(chromium, probed, folder, "--dump-dom", width=width)
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


def test_the_browser_shows_every_chart_and_figure(
    chromium: str, page: Path, comparison: Comparison, tmp_path: Path
) -> None:
    found = probe(chromium, page, tmp_path)
    assert [chart["id"] for chart in found["charts"]] == [f"chart-{measure.name}" for measure in MEASURES]
    for chart in found["charts"]:
        left, top, right, bottom = chart["box"]
        assert chart["complete"] and chart["width"] > 500, chart
        assert right - left > 300 and bottom - top > 150, chart
        assert "off and sam" in chart["alt"]
    cells = {row[0]: row[1:] for row in found["cells"]}
    assert found["headline"] == f"{comparison.speedup:.2f}×"
    assert found["colour"] == "rgb(20, 99, 216)", "a gain has the accent's colour"
    low, high = comparison.speedup_ci95
    assert cells["Generated tokens per second"][2] == f"{comparison.speedup:.2f}× [{low:.2f}, {high:.2f}]"
    assert cells["Reward"][0].startswith("0.250 [")
    assert cells["Acceptance rate (%)"][0] == "–"
    assert all(len(row) == 4 for row in found["cells"])
    assert found["steps"] == 4


def test_both_runs_are_drawn_in_every_chart(
    chromium: str, page: Path, comparison: Comparison, tmp_path: Path
) -> None:
    found = probe(chromium, page, tmp_path)
    picture = tmp_path / "page.png"
    browse(chromium, page, tmp_path, f"--screenshot={picture}")
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    for chart in found["charts"]:
        left, top, right, bottom = (round(edge) for edge in chart["box"])
        assert bottom < HEIGHT, "the chart lies outside the screenshot"
        area = pixels[top:bottom, left:right]
        both = math.isfinite(comparison.measures[chart["id"].removeprefix("chart-")].off.value)
        for colour in COLOURS if both else COLOURS[1:]:
            wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
            drawn = (np.abs(area - wanted).max(axis=2) < 24).sum()
            assert drawn > 100, (chart["id"], colour, drawn)


def test_a_narrow_window_scrolls_tables_not_the_page(chromium: str, page: Path, tmp_path: Path) -> None:
    assert probe(chromium, page, tmp_path, width=NARROW)["overflow"] <= 0


def test_the_page_of_replay_shows_its_picture_in_a_narrow_window(
    chromium: str, replayed: Path, tmp_path: Path
) -> None:
    found = probe(chromium, replayed, tmp_path, width=NARROW)
    (picture,) = found["charts"]
    left, _, right, _ = picture["box"]
    assert picture["complete"] and picture["width"] > 500 and right - left > 300, picture
    assert picture["alt"].startswith("Tokens per step") and found["headline"].startswith("Drafts would ")
    assert found["overflow"] <= 0


def test_a_broken_chart_would_be_seen(chromium: str, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(
        page.read_text().replace("data:image/png;base64,iVBOR", "data:image/png;base64,AAAA", 1)
    )
    assert probe(chromium, broken, tmp_path)["charts"][0]["width"] == 0
