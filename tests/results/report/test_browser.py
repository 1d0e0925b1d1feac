"""The page in a real browser, as wide as on a desk and on a telephone. Needs Chromium (.ci/run installs it).

One start of the browser shows all pages at both widths, each in a frame of its own; a script that is added to
copies of the pages measures them from inside.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 420)
SHOWN = ("plain", "lossy", "several")
TIMEOUT_S = 120
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--enable-logging=stderr", "--window-size=1400,1000", "--virtual-time-budget=20000", "--dump-dom",
)  # fmt: skip

# What scrolls to the side, what is cut, what covers a figure, and what is fetched.
MEASURE = """
<script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message)), true);
addEventListener("load", () => {
  const all = selector => [...document.querySelectorAll(selector)];
  const boxes = all("h1, h2, p, figure, .table, .banner, nav").map(each => [each.textContent.slice(0, 40),
    each.getBoundingClientRect()]);
  const cover = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  parent.postMessage({
    name: NAME,
    width: innerWidth,
    scrollWidth: document.documentElement.scrollWidth,
    images: [...document.images].map(image => [image.naturalWidth, image.getBoundingClientRect().width]),
    overlaps: boxes.flatMap(([name, a], i) => boxes.slice(0, i).filter(([, b]) => cover(a, b)).map(
      ([other]) => [name, other])),
    cut: all("h1, h2, p, dd, nav a").filter(
      each => each.clientWidth && each.scrollWidth > each.clientWidth + 1).map(each => each.textContent),
    tables: all(".table").map(
      box => [box.getBoundingClientRect().right, box.scrollWidth > box.clientWidth + 1]),
    smallest: Math.min(...all("body *").filter(each => each.offsetParent && each.textContent.trim() &&
      !each.closest("script")).map(each => parseFloat(getComputedStyle(each).fontSize))),
    requests: performance.getEntriesByType("resource").map(entry => entry.name).filter(
      name => !name.startsWith("data:")),
    title: document.title,
    errors,
  }, "*");
});
</script>
"""
HOST = """<!doctype html><meta charset="utf-8"><body><pre id="found"></pre><script>
const found = [];
addEventListener("message", event => {
  found.push(event.data);
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""


@pytest.fixture(scope="module")
def measured(
    pages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], dict[str, Any]]:
    """What the script has found, by page and width."""
    if BROWSER is None:
        pytest.skip("Chromium is not installed (.ci/run installs the package chromium where it may)")
    folder = tmp_path_factory.mktemp("browser")
    host = [HOST]
    for kind in SHOWN:
        script = MEASURE.replace("NAME", json.dumps(kind))
        page = pages[kind].read_text(encoding="utf-8").replace("<head>", f"<head>{script}", 1)
        (folder / f"{kind}.html").write_text(page, encoding="utf-8")
        host += [f'<iframe src="{kind}.html" width="{width}" height="900"></iframe>' for width in WIDTHS]
    (folder / "host.html").write_text("\n".join(host), encoding="utf-8")
    ended = subprocess.run(
        [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'profile'}", (folder / "host.html").as_uri()],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    match = re.search(r'<pre id="found">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert match and match[1], ended.stderr[-2000:]
    assert "CONSOLE" not in ended.stderr, ended.stderr[-2000:]
    found = json.loads(html.unescape(match[1]))
    return {(item["name"], item["width"]): item for item in found}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", SHOWN)
def test_a_page_fits_its_window(
    measured: dict[tuple[str, int], dict[str, Any]], kind: str, width: int
) -> None:
    found = measured[kind, width]
    assert found["scrollWidth"] <= width, "it scrolls to the side"
    assert found["overlaps"] == [] and found["cut"] == []
    assert found["errors"] == [] and found["requests"] == []
    assert all(right <= width for right, _ in found["tables"])
    # Numbers are seen without scrolling a table; many runs on a telephone do not fit side by side.
    assert not any(is_wider for _, is_wider in found["tables"]) or (kind, width) == ("several", 420)
    assert found["smallest"] >= 13, "letters that are too small to read"
    assert found["images"] and all(
        natural > 0 and 300 <= shown <= width for natural, shown in found["images"]
    )
    assert kind == "several" or found["title"].startswith("specdist report: ")


def test_a_prompt_is_no_script(measured: dict[tuple[str, int], dict[str, Any]]) -> None:
    """The prompts of its error rows would change the title."""
    assert all("taken over" not in found["title"] for found in measured.values())
