"""`make test-docs`: the built site as a visitor sees it, in headless Chromium."""

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.packaging.image import PROJECT

SITE = PROJECT / "build/site"
PAGES = sorted(str(path.parent.relative_to(SITE)) for path in SITE.rglob("index.html"))
NARROW, WIDE = 400, 1400


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = partial(Handler, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window(page: Page, address: str, name: str, width: int) -> None:
    """Nothing is wider than the window but what scrolls by itself, and pictures are there."""
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address}/{name}/")
    assert page.locator("h1").first.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    broken = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
    page.wait_for_load_state()
    assert page.evaluate(broken) == []


@pytest.mark.parametrize(("words", "found"), [("checkpoint", "writing"), ("ESTALE", "posix")])
def test_the_search_finds_a_page(page: Page, address: str, words: str, found: str) -> None:
    page.set_viewport_size({"width": WIDE, "height": 900})
    page.goto(address)
    page.get_by_placeholder("Search").fill(words)
    result = page.locator(f'.md-search-result__link[href*="/{found}/"]').first
    result.wait_for(state="attached")
    page.goto(str(result.get_attribute("href")))
    assert words.lower() in page.locator("article").inner_text().lower()


def test_a_visitor_gets_from_the_home_page_to_a_guide(page: Page, address: str) -> None:
    page.set_viewport_size({"width": NARROW, "height": 900})
    page.goto(address)
    page.get_by_role("link", name="train a model", exact=True).click()
    assert page.locator("h1").inner_text().startswith("Train a model")
