"""The documentation page in a real browser, as a reader sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from skerry.daemon.http import table
from tests import support
from tests.integration.daemon import started
from tests.integration.relay import relayed


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where a daemon can be reached. The page does not depend on the backend."""
    with support.temporary_home() as home, started(home, "--backend", "fake") as daemon:
        with relayed(daemon.socket) as address:
            yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = support.require("chromium")
    with sync_playwright() as playwright:
        # Its own sandbox wants a user other than root; it opens nothing but our page.
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


class Visit:
    """A page, with all that the browser complained about and asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("requestfailed", lambda request: self.complaints.append(request.url))


@pytest.fixture(params=["light", "dark"])
def visit(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visit]:
    scheme: Literal["light", "dark"] = request.param
    context = browser.new_context(color_scheme=scheme)
    yield Visit(context.new_page())
    context.close()


def test_the_page_shows_every_operation(visit: Visit, url: str) -> None:
    response = visit.page.goto(f"{url}/docs")
    assert response is not None
    assert response.ok
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for operation in table.OPERATIONS:
        section = visit.page.locator(f"section#{operation.name}")
        assert section.is_visible()
        words = section.inner_text()
        assert (
            f"{operation.method}\n{operation.path}" in words or f"{operation.method}{operation.path}" in words
        )
        assert operation.summary in words
        for parameter in operation.query:
            assert parameter.name in words
        assert operation.websocket or "curl " in section.locator("pre.curl").inner_text()
    assert visit.complaints == []
    assert {address for address in visit.asked if not address.startswith("data:")} == {f"{url}/docs"}


def test_its_style_is_applied_and_fits(visit: Visit, url: str) -> None:
    page = visit.page
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{url}/docs")
    colors: list[Any] = page.evaluate(
        "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color, s.marginTop] }"
    )
    assert colors[0] != colors[1]
    assert colors[2] == "0px"
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


def test_links_lead_somewhere(visit: Visit, url: str) -> None:
    visit.page.goto(f"{url}/docs")
    targets = visit.page.eval_on_selector_all(
        "a[href^='#']", "links => links.map(a => a.getAttribute('href'))"
    )
    assert len(targets) > 100
    assert [each for each in set(targets) if visit.page.locator(f"[id='{each[1:]}']").count() != 1] == []
    visit.page.click("text=Read a file")
    assert visit.page.url.endswith("#read_file")
