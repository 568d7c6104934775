"""The report in a real browser: charts are drawn, hovering answers, nothing is fetched, nothing overflows.

Screenshots are kept under artifacts/.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from report_example import example

from bcnet.report import charts, render

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ARTIFACTS = Path(__file__).parents[2] / "artifacts"
CHARTS = ("retained", "front", "progress", "log-width", "supernet-curve", "retrain-curve", "fairness", "costs")
VIEWS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light", "has_touch": True},
}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(example()), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        yield started.chromium


@pytest.fixture(scope="module", params=VIEWS)
def page(request, browser, report, tmp_path_factory):
    """The report, drawn; ``page.problems`` has what the console said and what was asked of the network."""
    profile = tmp_path_factory.mktemp("profile")
    context = browser.launch_persistent_context(
        str(profile), executable_path=CHROMIUM, args=FLAGS, **VIEWS[request.param]
    )
    page = context.new_page()
    page.problems, page.view = [], request.param
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda asked: _local(asked.url) or page.problems.append(asked.url))
    page.goto(report.as_uri())
    page.wait_for_function(f"document.querySelectorAll('[data-drawn]').length === {len(CHARTS)}")
    yield page
    context.close()


def _local(url: str) -> bool:
    return url.startswith(("file:", "data:"))


def test_all_charts_are_drawn(page):
    for name in CHARTS:
        if name != "fairness":  # folded away
            assert page.locator(f"#{name} .main-svg").first.bounding_box()["width"] > 250
    assert page.locator("#retained .bars .point").count() == 37
    assert page.locator("#front .scatterlayer .trace").count() == 5
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"report-{page.view}.png", full_page=True)


def test_hovering_over_a_bar_names_its_layers(page):
    bar = page.locator("#retained .bars .point").nth(6)
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = page.locator("#retained .hoverlayer .hovertext")
    label.first.wait_for()
    assert "layer6.add & co" in label.first.text_content()


def test_a_click_on_the_front_gives_a_command_to_copy(page):
    """On whichever point of the front is hit: points lie close together on a phone."""
    front = page.locator("#front .scatterlayer .trace").nth(1).locator(".point")
    front.first.scroll_into_view_if_needed()
    box = front.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.up()
    page.locator("#picked").wait_for()
    command = page.locator("#picked pre").text_content()
    assert command in [customdata[1] for customdata in charts.front(example())["data"][1]["customdata"]]
    assert command.startswith("bcnet pick ")


def test_another_variable_can_be_picked(page):
    page.locator("summary", has_text="How evenly").click()
    page.wait_for_function("document.querySelector('#fairness .main-svg').getBoundingClientRect().width > 250")
    page.locator("#fairness-variable").select_option(index=0)
    assert page.locator("#fairness-verdict").text_content() == "Each of its 67 channels is used 20 times: fair."
    page.wait_for_function("document.querySelectorAll('#fairness .scatterlayer .trace').length === 2")


def test_nothing_overflows(page):
    wide, visible = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= visible


def test_charts_follow_the_colour_scheme(page):
    colour = "rgb(76, 201, 189)" if page.view == "dark" else "rgb(12, 117, 111)"
    assert page.locator("#retained .bars .point path").first.evaluate("e => getComputedStyle(e).fill") == colour
    other = "light" if page.view == "dark" else "dark"
    page.emulate_media(color_scheme=other)
    page.wait_for_function(
        "old => getComputedStyle(document.querySelector('#retained .bars .point path')).fill !== old", arg=colour
    )
    page.emulate_media(color_scheme=VIEWS[page.view]["color_scheme"])


def test_printing_fits_the_paper(page):
    page.emulate_media(media="print")
    page.wait_for_function("document.querySelector('#retained .main-svg').clientWidth === 680")
    data = page.pdf(path=ARTIFACTS / f"report-{page.view}.pdf", prefer_css_page_size=True)
    page.emulate_media(media="screen")
    assert data.startswith(b"%PDF")
    page.wait_for_function("document.querySelector('#retained .main-svg').clientWidth !== 680")


def test_console_is_silent_and_nothing_was_fetched(page):
    assert page.problems == []
