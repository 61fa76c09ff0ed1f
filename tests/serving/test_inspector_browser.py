"""The inspector in headless Chromium: by mouse and keyboard, wide and narrow, light and dark. `make test-browser`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import outrider
from outrider.target.hub import EMBEDDED_ID
from tests.toys.browser import Browser, browsing
from tests.toys.serving import Served, serving

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(outrider.load(EMBEDDED_ID, "hybrid"), key="secret") as running:
        yield running


def ask(browser: Browser, tokens: int) -> None:
    """Send the prompt that is there, and wait for the end of the answer."""
    browser.page.fill("#most", str(tokens))
    browser.page.click("#send")
    browser.page.locator('#tokens[aria-busy="false"]').wait_for(timeout=120_000)


def test_the_page_shows_where_tokens_come_from(served: Served) -> None:
    with browsing() as browser:
        page = browser.page
        page.goto(served.url)
        page.locator("#key-field").wait_for()
        assert "401" in page.inner_text("#state"), "the key is asked for"
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.locator("#state.on").wait_for(timeout=10_000)
        browser.console.clear()  # Chromium logs the refusal
        ask(browser, 60)
        kinds = [
            set(one.split()) for one in page.eval_on_selector_all(".tokens .token", "all => all.map(t => t.className)")
        ]
        assert len(kinds) > 20
        assert all(any(kind in one for one in kinds) for kind in ("draft", "correction", "plain"))
        assert page.inner_text("#summary").startswith(f"{len(kinds)} tokens in ")

        page.focus("#tokens [aria-selected=true]")
        page.keyboard.press("Home")
        assert "Round 1" in page.inner_text("#detail") and "read in this step" in page.inner_text("#detail")
        page.keyboard.press("ArrowDown")
        detail = page.inner_text("#detail")
        assert "Round 2" in detail and "Why it stopped there" in detail and "p_t" in detail
        assert page.get_attribute("#rounds > :nth-child(2)", "aria-selected") == "true"
        page.focus("#rounds [aria-selected=true]")
        page.keyboard.press("End")
        last = page.locator(".round").count()
        assert f"Round {last}" in page.inner_text("#detail")
        page.hover(".tokens .token.draft")
        assert "accepted draft" in page.inner_text("#detail")
        page.click("#rounds > :nth-child(3)")
        assert "Round 3" in page.inner_text("#detail")

        page.locator("#positions svg").wait_for()
        assert page.locator("#cost svg").count() == page.locator("#drafts svg").count() == 1
        for theme in ("light", "dark"):
            assert browser.serious_findings() == [], theme
            browser.picture(f"inspector-{theme}")
            page.click("#theme")
        for width in (390, 820):
            page.set_viewport_size({"width": width, "height": 844})
            assert browser.width_of_content() == width, "nothing but a table or a strip scrolls sideways"
            assert browser.serious_findings() == [], width
            browser.picture(f"inspector-{width}")
        assert browser.console == []
        assert all(url.startswith(f"{served.url}/") for url in browser.asked if not url.startswith("data:"))


def test_what_the_server_refuses_and_what_is_stopped(served: Served) -> None:
    with browsing() as browser:
        page = browser.page
        page.goto(served.url)
        page.fill("#key", "secret")
        ask(browser, 1_000_000)
        assert "400: max_tokens" in page.inner_text("#summary")
        page.fill("#most", "4000")
        page.fill("#prompt", "Count to a thousand.")
        page.click("#send")
        page.locator(".tokens .token").nth(5).wait_for(timeout=60_000)
        page.click("#stop")
        page.locator('#tokens[aria-busy="false"]').wait_for()
        assert page.inner_text("#summary").startswith("Stopped after ")
        served.wait_until_free()
        page.uncheck("#speculative")
        page.fill("#prompt", "Say hello.")
        ask(browser, 4)
        assert page.locator(".tokens .token.plain").count() == 4
