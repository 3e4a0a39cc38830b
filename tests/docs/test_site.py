"""The documentation's site, built once and opened from disk, without a server or a network."""

import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from inspect import ismodule
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import rigidities
from tests.support import browser

pytestmark = pytest.mark.xdist_group("site")  # so that it is built once

ROOT = Path(__file__).parents[2]
DOORS = {
    "lightning": {"RigidityCallback", "RigidityModule"},
    "sklearn": {"RigidityRegressor", "nll_scorer", "crps_scorer", "coverage_scorer"},
    "transformers": {"RigidityCallback", "RigidityPipeline"},
    "trees": {"Forest"},
    "cli": {"main"},
}
"""What doors show that have no list of their own; importing them would take long."""
DOORS_BEGIN = tuple(f"rigidities.{name}" for name in (*DOORS, "ase"))
WIDTHS = (1400, 390)
MOST = 7
"""Entries of a section, or of a group in it, that one sees at once."""

NO_INDEX = 'var __index = {config: {lang: ["en"], separator: " ", pipeline: []}, docs: []}'
UNFIT = """() => {
  const frames = (e) => /auto|scroll|hidden/.test(getComputedStyle(e).overflowX);
  const beyond = (e) => e.getBoundingClientRect().right > innerWidth + 1;
  const framed = (e) => e.tagName !== "ARTICLE" &&
    (frames(e) && !beyond(e) || framed(e.parentElement));
  const found = [...document.querySelectorAll("article *")];
  const pictures = [...document.images].filter((i) => !i.naturalWidth);
  const page = document.scrollingElement;
  return [
    ...found.filter((e) => beyond(e) && !framed(e.parentElement)),
    ...pictures,
    ...(page.scrollWidth > innerWidth ? [page] : []),
  ].map((e) => e.outerHTML.slice(0, 120));
}"""


class Page(HTMLParser):
    """What a page links to, loads, and can be linked to by."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.anchors = path, set[str]()
        self.links, self.loaded, self.headings = list[str](), list[str](), list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(found["href"])
        if "doc-heading" in found.get("class", ""):
            self.headings.append(found["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """All pages but the one that a server shows for those that are not there."""
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.stem != "404"}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.launched() as running:
        yield running


@pytest.fixture
def page(chromium: Any, site: Path) -> Iterator[Any]:
    """A page of its own for each test, without a network; its complaints and requests fail it."""
    context = chromium.new_context(offline=True)
    shown = context.new_page()
    shown.set_default_timeout(browser.PATIENCE)
    complaints: list[str] = []
    shown.on("console", lambda message: complaints.append(f"{shown.url}: {message.text}"))
    shown.on("pageerror", lambda error: complaints.append(f"{shown.url}: {error}"))
    shown.on("request", lambda request: complaints.append(request.url))
    yield shown
    context.close()
    local = (site.as_uri() + "/", "data:", "blob:")
    assert [text for text in complaints if not text.startswith(local) or ".html: " in text] == []


def test_every_link_and_anchor_leads_somewhere(pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in set(page.links + page.loaded):
            there = urlsplit(link)
            if there.scheme:
                continue
            target = (path.parent / unquote(there.path)).resolve() if there.path else path
            anchors = pages[target].anchors if target in pages else {""}
            known = not there.fragment or unquote(there.fragment) in anchors
            if not target.is_file() or not known:
                lost.append(f"{path.name}: {link}")
    assert lost == []


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page]) -> None:
    foreign = {link for page in pages.values() for link in page.loaded if urlsplit(link).netloc}
    assert foreign == set()


def test_seven_entries_at_most_are_seen_at_once() -> None:
    import yaml

    class Loader(yaml.SafeLoader):
        """For tags of other parts of the file."""

    Loader.add_multi_constructor("", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]

    def sizes(entries: list[Any]) -> Iterator[int]:
        yield len(entries)
        for entry in entries:
            ((_, below),) = entry.items()
            yield from sizes(below) if isinstance(below, list) else ()

    assert max(sizes(nav)) <= MOST


def public(module: Any) -> Iterator[Any]:
    """The classes and functions that a room shows, and those of the rooms that it shows."""
    for name in getattr(module, "__all__", ()):
        found = getattr(module, name)
        if ismodule(found):
            yield from public(found)
        elif not isinstance(found, str):
            yield found


def test_every_public_name_is_documented_once(pages: dict[Path, Page]) -> None:
    reference = [page for path, page in pages.items() if path.parent.name == "reference"]
    names = Counter(name for page in reference for name in page.headings)
    assert [name for name, times in names.items() if times > 1] == []
    inner = (name for name in names if not name.startswith(DOORS_BEGIN))
    documented = Counter(id(pkgutil.resolve_name(name)) for name in inner)
    times = {str(found): documented[id(found)] for found in public(rigidities)}
    assert {name: number for name, number in times.items() if number != 1} == {}


def test_every_name_of_a_door_is_documented(pages: dict[Path, Page]) -> None:
    found = {name for page in pages.values() for name in page.headings}
    source = (ROOT / "src" / "rigidities" / "ase" / "__init__.py").read_text(encoding="utf-8")
    listed = set(re.findall(r'"(\w+)"', source.partition("__all__ = [")[2].partition("]")[0]))
    assert "RigidityCalculator" in listed
    for door, wanted in {**DOORS, "ase": listed}.items():
        assert {f"rigidities.{door}.{name}" for name in wanted} <= found


def test_every_option_of_the_commands_is_on_their_page() -> None:
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    source = (ROOT / "src" / "rigidities" / "cli" / "__init__.py").read_text(encoding="utf-8")
    options = set(re.findall(r'"(--\w[\w-]*)"', source))
    assert len(options) >= 12
    assert sorted(name for name in options if f"`{name}" not in text) == []


@pytest.mark.browser
def test_every_page_fits_a_desktop_and_a_phone_and_shows_its_pictures(
    page: Any, pages: dict[Path, Page]
) -> None:
    index = "**/search_index.js"  # not sought in, and large
    page.route(index, lambda route: route.fulfill(body=NO_INDEX))
    unfit = {}
    for path in pages:
        for width in WIDTHS:  # a drawer moves for a while when a page grows, so it shrinks
            page.set_viewport_size({"width": width, "height": 900})
            if width == WIDTHS[0]:
                page.goto(path.as_uri())
            if found := page.evaluate(UNFIT):
                unfit[path.name, width] = found
    assert unfit == {}


@pytest.mark.browser
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("conformal", "coverage.html"),
        ("onnx", "deploy.html"),
        ("units", "how_to/targets.html"),
        ("forces", "how_to/forces.html"),
        ("interval", "reference/prediction.html"),
        ("p.interval", "reference/prediction.html"),
        ("fit(x, y)", "reference/last_layer.html"),
        ("sample_weight", "reference/last_layer.html"),
    ],
)
def test_search_has_the_page_among_the_first_five_and_opens_it(
    asked: str, wanted: str, page: Any, site: Path
) -> None:
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    page.goto((site / "index.html").as_uri())
    page.fill("input.md-search__input", asked)
    page.keyboard.press("End")  # the search listens to keys
    first = ".md-search-result__item:nth-child(-n + 5)"
    page.locator(f"{first} > a[href*='{wanted}']").first.click()
    page.wait_for_url(f"**/{wanted}*")


@pytest.mark.browser
def test_a_reader_gets_from_home_to_a_name_by_clicks_on_a_phone(page: Any, site: Path) -> None:
    page.set_viewport_size({"width": WIDTHS[1], "height": 900})
    page.goto((site / "index.html").as_uri())
    page.get_by_role("link", name="reference", exact=True).click()
    page.get_by_role("link", name="LastLayerRigidity", exact=True).first.click()
    page.wait_for_url("**/reference/last_layer.html#rigidities.LastLayerRigidity")
    assert page.locator("[id='rigidities.LastLayerRigidity']").is_visible()
