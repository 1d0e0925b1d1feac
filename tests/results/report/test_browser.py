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

# What no two of may cover each other, and what its text must fit into.
MEASURE = """
<script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message)), true);
const boxes = selector => [...document.querySelectorAll(selector)].map(
  element => [element.tagName + " " + element.textContent.slice(0, 40), element.getBoundingClientRect()]);
function overlaps(selector) {
  const found = [], all = boxes(selector).filter(([, box]) => box.width && box.height);
  for (let i = 0; i < all.length; i++) for (let j = 0; j < i; j++) {
    const [name, a] = all[i], [other, b] = all[j];
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1) found.push([name, other]);
  }
  return found;
}
addEventListener("load", () => {
  const root = document.documentElement;
  parent.postMessage({
    name: NAME,
    width: innerWidth,
    scrollWidth: root.scrollWidth,
    height: root.scrollHeight,
    images: [...document.images].map(image => [image.naturalWidth, image.getBoundingClientRect().width]),
    overlaps: ["h1, h2, p, figure, .table, .banner, nav", "nav a", "dt, dd"].flatMap(overlaps),
    cut: [...document.querySelectorAll("h1, h2, p, dt, dd, nav a")].filter(
      element => element.clientWidth && element.scrollWidth > element.clientWidth + 1).map(
      element => element.textContent),
    tables: [...document.querySelectorAll(".table")].map(box => [box.getBoundingClientRect().right,
      box.scrollWidth > box.clientWidth + 1, box.textContent.slice(0, 60)]),
    smallest: Math.min(...[...document.querySelectorAll("body *")].filter(
      element => element.offsetParent && element.textContent.trim() && !element.closest("script")).map(
      element => parseFloat(getComputedStyle(element).fontSize))),
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
    assert all(right <= width for right, _, _ in found["tables"])
    # Numbers are seen without scrolling a table; many runs on a telephone do not fit side by side.
    scrolling = [text for _, is_wider, text in found["tables"] if is_wider]
    assert scrolling == [] or (kind, width) == ("several", 420)
    assert found["smallest"] >= 13, "letters that are too small to read"
    assert found["images"] and all(
        natural > 0 and 300 <= shown <= width for natural, shown in found["images"]
    )
    assert kind == "several" or found["title"].startswith("specdist report: ")


def test_a_prompt_is_no_script(measured: dict[tuple[str, int], dict[str, Any]]) -> None:
    """The prompts of its error rows would change the title."""
    assert all("taken over" not in found["title"] for found in measured.values())
