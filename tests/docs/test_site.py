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

SOUGHT = {
    "xgboost": "trees.html",
    "catboost": "trees.html",
    "gridsearchcv": "scikit_learn.html",
    "lastlayerrigidity": "start.html",
    "dataloader": "how_to/batches.html",
    "pytorch": "start.html",
    "ood": "concepts/when_bars_fail.html",
    "out of distribution": "concepts/when_bars_fail.html",
    "aleatoric": "concepts/epistemic_and_noise.html",
    "epistemic": "concepts/epistemic_and_noise.html",
    "credible": "error_bars.html",
    "confidence interval": "error_bars.html",
    "lstm": "models.html",
    "tutorial": "tutorials/first_error_bars.html",
    "notebook": "tutorials/first_error_bars.html",
    "scikit-learn": "scikit_learn.html",
    "lightning": "trainers.html",
    "transformers": "trainers.html",
    "onnx": "deploy.html",
    "gpu": "deploy.html",
    "csv": "tabular.html",
    "pandas": "tabular.html",
    "conformal": "coverage.html",
    "coverage": "coverage.html",
    "ensemble": "coming_from/ensembles.html",
    "dropout": "coming_from/ensembles.html",
    "laplace": "coming_from/laplace.html",
    "gaussian process": "coming_from/gaussian_processes.html",
    "jax": "frameworks.html",
    "keras": "frameworks.html",
    "plot": "plots.html",
    "scorer": "scikit_learn.html",
    "mace": "chemistry.html",
    "active learning": "how_to/active_learning.html",
    "skewed": "how_to/skewed.html",
    "save": "files.html",
    "streaming": "streams.html",
    "forces": "how_to/forces.html",
}
"""What readers ask for, and the guide that answers."""

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
        self.properties: dict[str, str] = {}
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
        if tag == "meta" and "content" in found:
            self.properties[found.get("property", found.get("name", ""))] = found["content"]
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
    addresses: list[str] = []
    shown.on("console", lambda message: complaints.append(f"{shown.url}: {message.text}"))
    shown.on("pageerror", lambda error: complaints.append(f"{shown.url}: {error}"))
    shown.on("request", lambda request: addresses.append(request.url))
    yield shown
    context.close()
    assert complaints == []
    local = (site.as_uri() + "/", "data:", "blob:")
    assert [address for address in addresses if not address.startswith(local)] == []


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


def test_every_page_names_a_card_that_exists_and_is_small(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        card = (path.parent / page.properties["og:image"]).resolve()
        assert card.is_file() and card.stat().st_size < 150_000
        assert page.properties["twitter:image"] == page.properties["og:image"]
        assert card.read_bytes()[16:24] == (1280).to_bytes(4, "big") + (640).to_bytes(4, "big")
    titles = {page.properties["og:title"] for page in pages.values()}
    assert {"rigidities", "Theory - rigidities"} <= titles


def test_badges_say_what_the_project_file_says() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    badges = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/assets/badge-*"))]
    texts = dict(re.findall('aria-label="(.+): (.+)"', "".join(badges)))
    (torch,) = [name for name in project["dependencies"] if name.startswith("torch")]
    pythons = [name.split()[-1] for name in project["classifiers"] if re.search(r":: 3\.", name)]
    assert texts == {
        "licence": project["license"],
        "Python": f"{pythons[0]} to {pythons[-1]}",
        "PyTorch": f"{torch.removeprefix('torch>=')} or newer",
    }


def settings() -> dict[str, Any]:
    """The site's settings, without what tags of theirs stand for."""
    import yaml

    class Loader(yaml.SafeLoader):
        """For tags of other parts of the file."""

    Loader.add_multi_constructor("", lambda *_: None)
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return dict(yaml.load(text, Loader))


def test_pages_that_the_search_has_keywords_for_exist(site: Path) -> None:
    pages = [page.replace(".md", ".html") for page in settings()["extra"]["keywords"]]
    assert [page for page in pages if not (site / page).is_file()] == []


def test_seven_entries_at_most_are_seen_at_once() -> None:
    nav = settings()["nav"]

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
        ("units", "how_to/targets.html"),
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


def results(page: Any, asked: str) -> list[str]:
    """The addresses of the first two pages that the search finds."""
    # Emptied in between, so that results of an earlier word are not read.
    for text, said in (("", "Type to start"), (asked, "matching document")):
        page.fill("input.md-search__input", text)
        page.keyboard.press("End")
        page.locator(".md-search-result__meta", has_text=said).wait_for()
    found = page.locator(".md-search-result__item:nth-child(-n + 2) > a:first-child").all()
    return [urlsplit(link.get_attribute("href")).path for link in found]


@pytest.mark.browser
@pytest.mark.thorough
def test_search_finds_the_guide_by_the_words_that_readers_use_in_any_case(
    page: Any, site: Path
) -> None:
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    page.goto((site / "index.html").as_uri())
    page.locator("input.md-search__input").click()
    missed = {}
    for word, wanted in SOUGHT.items():
        odd = "".join(c.upper() if i % 2 else c for i, c in enumerate(word))  # xGbOoSt
        for asked in (word, odd):
            found = results(page, asked)
            if not any(address.endswith(f"/{wanted}") for address in found):
                missed[asked] = found
    assert missed == {}


@pytest.mark.browser
def test_a_reader_gets_from_home_to_a_name_by_clicks_on_a_phone(page: Any, site: Path) -> None:
    page.set_viewport_size({"width": WIDTHS[1], "height": 900})
    page.goto((site / "index.html").as_uri())
    page.get_by_role("link", name="reference", exact=True).click()
    page.get_by_role("link", name="LastLayerRigidity", exact=True).first.click()
    page.wait_for_url("**/reference/last_layer.html#rigidities.LastLayerRigidity")
    assert page.locator("[id='rigidities.LastLayerRigidity']").is_visible()
