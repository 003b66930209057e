"""The site: every page is listed, every link leads to a heading that is there, and it builds.

Building takes the extra `docs`; without it, that part is skipped.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import browser

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDERS = (DOCS, ROOT / "papers", ROOT / "benchmarks")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LISTS = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.M | re.S)


def listed() -> list[Path]:
    """Return the pages in the lists of the site, in their order."""
    found: list[Path] = []
    for entries in LISTS.findall((DOCS / "contents.md").read_text()):
        for line in (line.strip() for line in entries.splitlines()):
            if line and not line.startswith(":"):
                pages = sorted(DOCS.glob(f"{line}.md"))
                assert pages, line
                found += pages
    return [page.resolve() for page in found]


def test_every_page_is_listed_once() -> None:
    found = listed()
    own = {page for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert own - set(found) == {DOCS / "index.md", DOCS / "contents.md"}
    repeated = {page for page in found if found.count(page) > 1}
    assert repeated <= {ROOT / "benchmarks" / "README.md"}, repeated
    assert ROOT / "papers" / "levers" / "README.md" in found


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    words = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", word).replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if target.startswith(("http", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), target
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), target


# ---- built


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [n for n in ("sphinx", "furo", "myst_parser") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; pip install 'sizewise[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", DOCS, ROOT, out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return out


SHOWN = (
    *("docs/contents", "docs/methods/heterofl", "docs/config", "docs/alternatives"),
    *("docs/reference", "docs/choose-a-method", "papers/FIDELITY"),
)


@pytest.mark.parametrize("width", [1280, 400], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", SHOWN)
def test_pages_fit_the_window(site: Path, chromium: browser.Page, name: str, width: int) -> None:
    """Nothing but a table or a block of code is wider than the page, and these scroll inside."""
    chromium.open(site / f"{name}.html", width, 900)
    assert chromium.complaints == []
    assert [url for url in chromium.requests if not url.startswith(("file:", "data:"))] == []
    assert chromium.ask("document.documentElement.scrollWidth") <= width
    outside = chromium.ask(
        "[...document.querySelectorAll('article p, article li, article img, article h1')].filter("
        "e => !e.closest('table, pre') && e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.textContent.slice(0, 60))"
    )
    assert outside == []
    if folder := os.environ.get("SIZEWISE_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        chromium.screenshot(Path(folder, f"{name.replace('/', '-')}-{width}.png"))


def test_the_search_finds(site: Path, chromium: browser.Page) -> None:
    chromium.open(f"{(site / 'search.html').as_uri()}?q=bfloat16", 1280, 900)
    found: list[str] = []
    for _ in range(50):
        found = chromium.ask("[...document.querySelectorAll('ul.search li a')].map(a => a.href)")
        if found:
            break
        chromium.ask("new Promise(done => setTimeout(() => done(1), 100))")
    assert any("levers.html" in link for link in found), found


def test_dark_pages_are_dark_and_pictures_lie_on_paper(site: Path, chromium: browser.Page) -> None:
    chromium.open(site / "docs" / "contents.html", 1280, 900, dark=True)
    page = chromium.ask("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", page)[:3])) < 60
    paper = chromium.ask("getComputedStyle(document.querySelector('article img')).backgroundColor")
    assert paper == "rgb(255, 253, 248)"


def test_the_root_leads_to_the_first_page(site: Path) -> None:
    target = re.findall(r"url=([^\"]+)", (site / "index.html").read_text())
    assert target == ["docs/contents.html"]
    assert (site / target[0]).is_file()
