"""A report in a real browser: what is seen, in light and dark, on a wide and a narrow page."""

import os
import shutil

import pytest
from tests.evidence import report_runs as made

from headstart.evidence import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SCREENS = [("light", 1280), ("dark", 1280), ("light", 420)]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else BROWSERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    # Chromium starts no sandbox for root.
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=[*QUIET, *as_root])
        yield started
        started.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    page = folder / "report.html"
    page.write_text(report.page(report.read_runs(made.everything(folder))))
    return page


@pytest.fixture(scope="module", params=SCREENS, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def seen(request, browser, file):
    """The page, and everything it said or asked for while it was loaded and scrolled through."""
    scheme, width = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.heard = []
    page.on("console", lambda message: page.heard.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: page.heard.append(f"error: {error}"))
    page.on("request", lambda asked: page.heard.append(asked.url))
    page.goto(file.as_uri())
    page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
    yield page
    page.close()


def test_it_asks_for_nothing_and_complains_of_nothing(seen, file):
    assert seen.title() == "headstart: evidence"
    assert seen.heard == [file.as_uri()]


def test_key_numbers_can_be_read(seen):
    shown = seen.inner_text("main")
    for words in (
        "0 of 120 tensors differ", "35 arms right and timed on 9 cases", "0.941 [0.922, 0.960]",
        "SURVIVES", "2500%", "13.7 x", "97.7%", "0123456789ab",
    ):  # fmt: skip
        assert words in shown, words
    folded = seen.locator("details", has_text="How it was timed").first
    assert not folded.locator("table").is_visible()
    folded.locator("summary").click()
    assert "4.000" in folded.inner_text()


def test_figures_are_large_and_hold_all_their_text(seen):
    figures = seen.locator("figure svg")
    assert figures.count() == 11
    for index in range(figures.count()):
        figure = figures.nth(index)
        box = figure.bounding_box()
        assert box["width"] >= 680, box
        assert 0.15 * box["width"] <= box["height"] <= 2 * box["width"], box
        outside = figure.evaluate(
            """figure => {
                const whole = figure.getBoundingClientRect();
                return [...figure.querySelectorAll('text')].filter(text => {
                    const box = text.getBoundingClientRect();
                    return box.width === 0 || box.left < whole.left - 1 || box.top < whole.top - 1
                        || box.right > whole.right + 1 || box.bottom > whole.bottom + 1;
                }).map(text => text.textContent);
            }"""
        )
        assert outside == []


def test_labels_of_an_axis_do_not_lie_on_each_other(seen):
    crowded = seen.evaluate(
        """() => [...document.querySelectorAll('svg [id^="matplotlib.axis"]')].flatMap(axis => {
            const labels = [...axis.querySelectorAll('[id*="tick"] text')];
            const boxes = labels.map(label => label.getBoundingClientRect());
            return labels.filter((_, i) => i && boxes[i].left < boxes[i - 1].right
                && boxes[i - 1].left < boxes[i].right && boxes[i].top < boxes[i - 1].bottom
                && boxes[i - 1].top < boxes[i].bottom).map(label => label.textContent);
        })"""
    )
    assert crowded == []


def test_only_tables_and_figures_scroll_sideways(seen):
    assert seen.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert (
        seen.locator(".scroll").first.evaluate("box => getComputedStyle(box).overflowX") == "auto"
    )


def test_text_stands_out_from_its_ground(seen):
    faint = seen.evaluate(
        """() => {
            const channels = color => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const light = color => channels(color).map(c => c / 255)
                .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
                .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
            const ground = light(getComputedStyle(document.body).backgroundColor);
            const contrast = color => {
                const [low, high] = [light(color), ground].sort((a, b) => a - b);
                return (high + 0.05) / (low + 0.05);
            };
            const inks = [...document.querySelectorAll('main *, header *')].filter(
                one => [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
            return [...new Set(inks.map(one => {
                const style = getComputedStyle(one);
                return one.tagName === 'text' ? style.fill : style.color;
            }))].filter(color => contrast(color) < 4.5);
        }"""
    )
    assert faint == []
