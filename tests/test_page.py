"""A report's page in Debian's chromium. Without it: left out, or failed with ROLLOUT_SPEC_NEEDS_BROWSER."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from rollout_spec.report.comparison import write_report
from tests.runs import compared

HEIGHT, WIDEST = 4800, 1300
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
      alt: image.alt, complete: image.complete, box: box(image),
      shape: [image.naturalWidth, image.naturalHeight] })),
    overflow: document.documentElement.scrollWidth - innerWidth,
  };
  const probe = document.createElement("pre");
  probe.id = "probe";
  probe.textContent = JSON.stringify(found);
  parent.document.body.append(probe);
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
    steps = [10.0, 20.0, 10.0, 12.0], [5.0, 10.0, 6.0, 6.0]
    comparison = compared(folder, *steps, [1000, 2000, 1000, 1100], [1000, 1800, 1200, 1100])
    return write_report(comparison, folder / "report", {"Model": "a <small> one"})["html"]


def probe(chromium, page, folder, width):
    """In a frame, because chromium opens no window as narrow as a phone."""
    probed = folder / "probed.html"
    inner = html.escape(page.read_text().replace("</body>", PROBE + "</body>"))
    size = f'width="{width}" height="{HEIGHT}"'
    probed.write_text(f'<!doctype html><iframe {size} style="border: 0" srcdoc="{inner}"></iframe>')
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars", "dump-dom")
    command = [chromium, *(f"--{flag}" for flag in flags), f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={WIDEST},{HEIGHT}", probed.as_uri()]
    env = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize(("width", "least"), [(1200, 800), (390, 340)])
def test_the_picture_fits_and_wide_tables_scroll_inside_the_page(chromium, page, tmp_path, width, least):
    found = probe(chromium, page, tmp_path, width)
    (picture,) = found["pictures"]
    left, _, right, bottom = picture["box"]
    wide, high = picture["shape"]
    assert picture["complete"] and wide > 600, picture
    assert right - left > least and right <= width and bottom < HEIGHT, picture
    assert high / wide > 6 or width > 390, "a phone has the panels below one another"
    assert picture["alt"].endswith("off and sam")
    assert found["overflow"] <= 0
