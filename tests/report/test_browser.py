"""The HTML report in a real browser: without a network it draws, switches, tells rows, and fits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.frame.html_page import experiment_page

from rigidities import report
from tests.support import browser

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]

EVIL = "<script>bad=1</script>"
QUOTED = """the "best" one's"""
WIDER = """() => [...document.querySelectorAll("body *")]
    .filter((e) => !e.closest(".box, .plot") && e.getBoundingClientRect().right > innerWidth + 1)
    .map((e) => e.outerHTML.slice(0, 80))"""


def arrays(count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    mean, log_std, z = torch.randn(3, count, generator=generator, dtype=torch.float64)
    std = (0.7 * log_std).exp()
    return 3 * mean, std, 3 * mean + std * z


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages: one target, more rows than the parity plot shows, three targets, an experiment."""
    folder = tmp_path_factory.mktemp("pages")
    mean, std, target = arrays(400)
    inputs = {EVIL: [f"<b>{k}</b>" for k in range(400)], "a" * 90: list(range(400))}
    one = report.html(mean, target, std=std, title=f"Four hundred rows {EVIL}", inputs=inputs)
    report.save(folder / "one.html", one)
    mean, std, target = arrays(1200)
    many = report.html(mean, target, std=std, inputs={QUOTED: [QUOTED] * 1200})
    report.save(folder / "many.html", many)
    mean, std, target = (part.reshape(60, 3) for part in arrays(180))
    three = report.html(mean, target, std=std, names=["energy", EVIL, "gap"])
    report.save(folder / "three.html", three)
    methods = {name: {"rmse": [1.0, 0.1], "nll": [0.5, 0.2]} for name in ("llpr", QUOTED, EVIL)}
    numbers: dict[str, Any] = {f"set {k}": {"splits": 20, **methods} for k in range(3)}
    numbers["a case"] = {"points": {"std": [1.0, 2.0], "error": [0.5, 3.0]}}
    numbers["wide"] = {f"row {i}": {f"column {k}": i * k for k in range(30)} for i in range(4)}
    report.save(folder / "experiment.html", experiment_page(numbers, title="UCI"))
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.launched() as running:
        yield running


@contextmanager
def opened(chromium: Any, path: Path, width: int = 1280, **options: Any) -> Iterator[Any]:
    """A page without a network, whose complaints and requests fail the test."""
    size = {"width": width, "height": 900}
    context = chromium.new_context(viewport=size, offline=True, **options)
    page = context.new_page()
    page.set_default_timeout(browser.PATIENCE)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(path.as_uri())
    try:
        yield page
        local = (path.as_uri(), "data:", "blob:")
        assert [text for text in complaints if not text.startswith(local)] == []
        assert page.evaluate("window.bad") is None
    finally:
        context.close()


@pytest.fixture(scope="module")
def one(chromium: Any, folder: Path) -> Iterator[Any]:
    """The report of one target on a desktop."""
    with opened(chromium, folder / "one.html") as page:
        drawn(page, "t0-errors")
        yield page


@pytest.fixture(scope="module")
def many(chromium: Any, folder: Path) -> Iterator[Any]:
    """The report of more rows than the parity plot shows."""
    with opened(chromium, folder / "many.html") as page:
        yield page


@pytest.fixture(scope="module")
def experiment(chromium: Any, folder: Path) -> Iterator[Any]:
    """The page of an experiment on a desktop."""
    with opened(chromium, folder / "experiment.html") as page:
        yield page


@pytest.fixture(scope="module", params=["one", "experiment", "three"])
def phone(request: Any, chromium: Any, folder: Path) -> Iterator[Any]:
    """Pages on a phone by night."""
    path = folder / f"{request.param}.html"
    with opened(chromium, path, width=390, color_scheme="dark") as page:
        yield page


def drawn(page: Any, name: str) -> Any:
    """A plot, once its points are there."""
    place = page.locator(f"#{name}")
    place.scroll_into_view_if_needed()
    page.wait_for_selector(
        f"#{name} .scatterlayer .trace, #{name} .barlayer .trace", state="attached"
    )
    return place


def points(page: Any, name: str) -> int:
    return int(drawn(page, name).locator(".scatterlayer .points path").count())


def layout(page: Any, name: str) -> Any:
    return page.evaluate(f"(() => document.getElementById('{name}').layout)()")


def test_every_plot_is_drawn_without_a_network(one: Any) -> None:
    for name in ("errors", "binned", "coverage", "parity", "sparsification", "histogram"):
        assert drawn(one, f"t0-{name}").locator("svg.main-svg").count() >= 1
    # the rows, and those below the logarithmic axis once more
    assert 400 <= points(one, "t0-errors") <= 410
    assert points(one, "t0-parity") == 400
    assert one.locator("#t0-histogram .barlayer .point").count() == 40


def test_the_switch_changes_the_axes_of_its_plot_alone(one: Any) -> None:
    figure = one.locator("figure", has=one.locator("#t0-errors"))
    drawn(one, "t0-binned")
    figure.get_by_label("linear").check()
    one.wait_for_function(
        "() => document.getElementById('t0-errors').layout.xaxis.type === 'linear'"
    )
    assert layout(one, "t0-errors")["yaxis"]["type"] == "linear"
    assert layout(one, "t0-binned")["xaxis"]["type"] == "log"
    assert points(one, "t0-errors") == 400
    figure.get_by_label("logarithmic").focus()
    one.keyboard.press("Space")
    one.wait_for_function("() => document.getElementById('t0-errors').layout.xaxis.type === 'log'")


def test_the_rows_per_bin_change_the_number_of_points(one: Any) -> None:
    choice = one.get_by_label("Rows per bin")
    for size, count in (("10", 40), ("100", 4), ("20", 20)):
        choice.select_option(size)
        one.wait_for_function(
            "n => document.querySelectorAll('#t0-binned .scatterlayer .points path').length === n",
            arg=count,
        )
        assert points(one, "t0-binned") == count


def pointed(page: Any, name: str, number: int) -> tuple[str, float, float]:
    """What is told where the mouse is put on a point, and the point's coordinates."""
    place = drawn(page, name)
    page.mouse.move(0, 0)
    page.evaluate(
        "name => document.getElementById(name).on('plotly_hover', "
        "event => { window.pointed = event.points[0]; })",
        name,
    )
    page.evaluate("window.pointed = undefined")
    trace = place.locator(".scatterlayer .trace").first
    trace.locator(".points path").nth(number).hover(force=True)
    page.wait_for_function("() => window.pointed !== undefined")
    label = page.locator(f"#{name} .hoverlayer .hovertext text").first
    label.wait_for()
    x, y = page.evaluate("[window.pointed.x, window.pointed.y]")
    return label.text_content(), x, y


def nearest(values: torch.Tensor, value: float) -> int:
    return int((values - value).abs().argmin())


def test_pointing_at_a_row_tells_which_it_is(many: Any) -> None:
    mean, std, target = arrays(1200)
    for number in (3, 417, 1100):
        told, x, y = pointed(many, "t0-errors", number)
        row = nearest(std, x)
        assert y == pytest.approx(float((target - mean)[row].abs()), rel=1e-4)
        assert told.startswith(f"row {row}prediction {mean[row]:.6g} ± {std[row]:.3g}")
    assert points(many, "t0-parity") == 800
    for number in (3, 417, 790):
        told, x, y = pointed(many, "t0-parity", number)
        row = nearest(target, x)
        assert y == pytest.approx(float(mean[row]), rel=1e-4)
        assert told.startswith(f"row {row}prediction {mean[row]:.6g} ± {std[row]:.3g}")


def test_quotes_are_shown_as_quotes(many: Any, experiment: Any) -> None:
    assert f"{QUOTED}: {QUOTED}" in pointed(many, "t0-errors", 7)[0]
    drawn(experiment, "f0")
    assert QUOTED in experiment.locator("#f0 .yaxislayer-above").text_content()
    assert QUOTED in pointed(experiment, "f0", 1)[0]


def test_what_one_points_at_is_text_and_not_run(one: Any) -> None:
    told, *_ = pointed(one, "t0-errors", 17)
    assert EVIL in told
    assert "<b>" in told


def test_text_from_data_is_shown_and_not_run(one: Any) -> None:
    assert one.locator("h1").text_content() == f"Four hundred rows {EVIL}"
    assert one.get_by_role("columnheader", name=EVIL).count() == 1
    assert one.evaluate("window.bad") is None


def test_nothing_is_wider_than_a_phone_or_a_desktop(phone: Any, tmp_path: Path) -> None:
    for width in (390, 1280):
        phone.set_viewport_size({"width": width, "height": 900})
        phone.locator(".plot:visible").first.scroll_into_view_if_needed()  # where it is drawn
        phone.wait_for_selector(".plot.drawn svg.main-svg")
        phone.wait_for_function(
            "() => [...document.querySelectorAll('.plot.drawn svg.main-svg')].every("
            "svg => svg.getBoundingClientRect().right <= window.innerWidth)"
        )
        assert phone.evaluate(WIDER) == []
        assert phone.evaluate("document.documentElement.scrollWidth") <= width
        picture = tmp_path / f"{width}.png"
        phone.screenshot(path=picture)
        assert picture.stat().st_size > 10_000


def test_each_target_is_chosen_from_a_list(chromium: Any, folder: Path) -> None:
    with opened(chromium, folder / "three.html") as page:
        sections = page.locator("section[data-target]")
        chosen = page.locator("select[data-sections]").input_value()
        worst = page.locator("div.verdict h2").first.text_content()
        assert worst.startswith(page.locator("select[data-sections] option:checked").text_content())
        shown = [s.get_attribute("data-target") for s in sections.all() if s.is_visible()]
        assert shown == [chosen]
        page.locator("select[data-sections]").select_option(label=EVIL)
        assert [s.is_visible() for s in sections.all()] == [False, True, False]
        assert points(page, "t1-errors") >= 60
        others = {"t0", "t2"} - {chosen}
        assert all(page.locator(f"#{name}-errors svg").count() == 0 for name in others)


def test_one_choice_switches_the_plots_of_all_data_sets(experiment: Any) -> None:
    drawn(experiment, "f0")
    assert experiment.evaluate("document.getElementById('f0').data[0].x[0]") == 1.0
    experiment.get_by_label("Metric").select_option("NLL")
    experiment.wait_for_function("() => document.getElementById('f0').data[0].x[0] === 0.5")
    drawn(experiment, "f2")
    assert experiment.evaluate("document.getElementById('f2').data[0].x[0]") == 0.5
    assert EVIL in experiment.locator("#f0 .yaxislayer-above").text_content()
    assert points(experiment, "f3") == 2


def test_by_night_and_on_paper_text_can_be_read(phone: Any) -> None:
    phone.locator(".plot:visible").first.scroll_into_view_if_needed()  # where it is drawn
    phone.wait_for_selector(".plot.drawn .xtick text, .plot.drawn .ytick text", state="attached")
    inks = """() => [...document.querySelectorAll('.plot')]
        .filter((place) => place.checkVisibility())
        .map((place) => place.querySelector('.xtick text, .ytick text'))
        .map((text) => text && getComputedStyle(text).fill)"""
    background = "getComputedStyle(document.body).backgroundColor"
    assert "rgb(232, 232, 232)" in phone.evaluate(inks)
    assert phone.evaluate(background) == "rgb(22, 25, 28)"
    phone.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    # all that is not hidden, drawn before or not
    phone.wait_for_function(f"() => ({inks})().every((ink) => ink === 'rgb(27, 27, 27)')")
    phone.emulate_media(media="print", color_scheme="dark")
    assert phone.locator(".controls").first.is_hidden()
    assert phone.evaluate(background) == "rgb(255, 255, 255)"
    assert phone.locator("section[hidden] .plot.drawn").count() == 0
    phone.emulate_media(media="screen", color_scheme="dark")
    phone.evaluate("window.dispatchEvent(new Event('afterprint'))")
    phone.wait_for_function(f"() => ({inks})().includes('rgb(232, 232, 232)')")


def test_the_tools_of_a_plot_cover_nothing_and_show_when_asked_for(one: Any) -> None:
    place = drawn(one, "t0-coverage")
    one.mouse.move(0, 0)
    bar = place.locator(".modebar-group").first
    bar.wait_for(state="attached")
    opacity = "getComputedStyle(document.querySelector('#t0-coverage .modebar')).opacity"
    one.wait_for_function(f"() => {opacity} === '0'")
    assert bar.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"
    # none that would send the plot anywhere
    tools = [each.get_attribute("aria-label") for each in place.locator(".modebar-btn").all()]
    assert tools == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]
    place.hover()
    one.wait_for_function(f"() => {opacity} === '1'")


def test_links_lead_to_the_parts_of_an_experiment(experiment: Any) -> None:
    experiment.evaluate("window.scrollTo(0, 0)")
    experiment.get_by_role("link", name="Further numbers").click()
    heading = experiment.get_by_role("heading", name="Further numbers")
    experiment.wait_for_function("() => window.scrollY > 0")
    assert 0 <= heading.bounding_box()["y"] < 900
