"""The pages as a browser shows them: Debian's chromium, headless.

Without chromium these tests are left out, unless ROLLOUT_SPEC_NEEDS_BROWSER is set, as .ci/run does:
then they fail.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollout_spec.cli import main
from rollout_spec.report.comparison import write_report
from rollout_spec.report.measures import compare
from rollout_spec.report.runs import read_run
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
    pictures: [...document.images].map((image) => ({
      alt: image.alt, width: image.naturalWidth, complete: image.complete, box: box(image) })),
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
def chromium():
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("ROLLOUT_SPEC_NEEDS_BROWSER"):
        pytest.fail(INSTALL)
    if found is None:
        pytest.skip(INSTALL)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    off = write_run(folder / "off", [10.0, 20.0, 10.0, 12.0], [1000, 2000, 1000, 1100])
    on = write_run(folder / "on", [5.0, 10.0, 6.0, 6.0], [1000, 1800, 1200, 1100], True)
    comparison = compare(read_run(off, "off"), read_run(on, "sam"))
    return write_report(comparison, folder / "report", {"Model": "a <small> one"})["html"]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The page of `replay`; a step of 19 digits makes a table wider than a narrow window."""
    folder = tmp_path_factory.mktemp("replayed")
    trace = folder / "trace.jsonl"
    trace.write_text("".join(to_line("a", step, [1, 2], [[1, 2] * 9, [3]]) for step in (1, 2**62)))
    assert main(["replay", str(trace), "--output", str(folder)]) == 0
    return folder / "replay.html"


def browse(chromium: str, page: Path, folder: Path, *arguments: str, width: int = WIDTH) -> str:
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars")
    command = [chromium, *(f"--{flag}" for flag in flags), f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},{HEIGHT}", *arguments, page.as_uri()]
    env = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def probe(chromium: str, page: Path, folder: Path, width: int = WIDTH) -> dict[str, Any]:
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    dom = browse(chromium, probed, folder, "--dump-dom", width=width)
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


def test_the_browser_shows_the_picture_with_both_runs(chromium, page, tmp_path):
    found = probe(chromium, page, tmp_path)
    (picture,) = found["pictures"]
    left, _, right, bottom = picture["box"]
    assert picture["complete"] and picture["width"] > 1000 and right - left > 800 and bottom < HEIGHT, picture
    assert picture["alt"].endswith("off and sam")


@pytest.mark.parametrize("command", ["compare", "replay"])
def test_in_a_narrow_window_tables_scroll_and_not_the_page(chromium, page, replayed, tmp_path, command):
    found = probe(chromium, page if command == "compare" else replayed, tmp_path, width=NARROW)
    (picture,) = found["pictures"]
    left, _, right, _ = picture["box"]
    assert picture["complete"] and picture["width"] > 500 and right - left > 300, picture
    assert found["overflow"] <= 0
