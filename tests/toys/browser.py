"""Chromium without a window on a page of ours: what it logs, what it asks for, and what axe-core finds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Browser:
    """An open page (playwright's), with the lines of its console and the addresses it asked for."""

    page: Any
    console: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def serious_findings(self) -> list[str]:
        """What axe-core calls serious or critical."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes'][:3]]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    def picture(self, name: str) -> None:
        """A screenshot of the whole page into $OUTRIDER_PICTURES, where that is set."""
        if directory := os.environ.get("OUTRIDER_PICTURES"):
            self.page.screenshot(path=Path(directory) / f"{name}.png", full_page=True)

    def width_of_content(self) -> int:
        """Of the page, in pixels; more than the window's means that it scrolls sideways."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))


@contextmanager
def browsing(width: int = 1440, height: int = 900) -> Iterator[Browser]:
    """A page in the machine's Chromium (`$CHROMIUM`, or found by name), else in playwright's own."""
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        if found is None and not Path(playwright.chromium.executable_path).is_file():
            pytest.skip("no Chromium here, and none could be installed: set $CHROMIUM to the program")
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": width, "height": height}, bypass_csp=False)
        browser = Browser(page)
        page.on("console", lambda line: browser.console.append(f"{line.type}: {line.text}"))
        page.on("pageerror", lambda error: browser.console.append(f"error: {error}"))
        page.on("request", lambda request: browser.asked.append(request.url))
        try:
            yield browser
        finally:
            chromium.close()
