"""The page in a real browser: headless Chromium. The page forbids itself every request, so one is an error there."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from batchspec.pipeline.report import report_numbers, write_html
from tests.report.jobs import write_job
from tests.report.test_numbers import AUDIT, PROFILE, SAVING
from tests.report.test_page import FIGURES

pytestmark = pytest.mark.browser


def chromium(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found is not None, "install Chromium (apt-get install chromium) to run the browser tests"
    quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    logged = ["--enable-logging=stderr", "--v=0"]
    shown = ["--hide-scrollbars", "--window-size=1200,2600"]
    command = [found, *quiet, *logged, *shown, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    job = write_job(folder / "job", saving=SAVING, profile=PROFILE)
    (job / "_batchspec/audit.json").write_text(json.dumps(AUDIT))
    fast = write_job(folder / "fast", speed=2.0)
    write_html(report_numbers([str(job), str(fast)]), str(folder / "page.html"))
    return folder / "page.html"


def test_the_browser_shows_every_figure_without_a_complaint(page: Path) -> None:
    done = chromium("--dump-dom", page.as_uri())
    assert "CONSOLE" not in done.stderr
    assert re.findall(r'role="img" aria-label="([^"]*?)\. ', done.stdout)[1 : 1 + len(FIGURES)] == FIGURES
    assert done.stdout.count("<svg") == done.stdout.count("<figure")


@pytest.mark.parametrize(
    "addition",
    [
        '<img src="http://elsewhere.example/x.png">',
        "<style>@import url(http://elsewhere.example/x.css)</style>",
        "<script>console.error('x')</script>",
    ],
    ids=["image", "style", "script"],
)
def test_a_request_or_a_script_would_be_seen(page: Path, addition: str) -> None:
    changed = page.with_name("changed.html")
    changed.write_text(page.read_text().replace("</main>", f"{addition}</main>", 1))
    assert "CONSOLE" in chromium("--dump-dom", changed.as_uri()).stderr


def test_the_page_is_drawn_and_printed(page: Path) -> None:
    picture, printed = page.with_name("page.png"), page.with_name("page.pdf")
    chromium(f"--screenshot={picture}", page.as_uri())
    chromium("--no-pdf-header-footer", f"--print-to-pdf={printed}", page.as_uri())
    assert picture.stat().st_size > 50_000
    assert printed.read_bytes().startswith(b"%PDF")
