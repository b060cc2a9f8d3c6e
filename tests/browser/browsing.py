"""Pages that are watched while a test uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

KEY = "sesame-17"
DESKTOP = {"width": 1280, "height": 900}


class Opener:
    """Opens pages, and notes what must not happen: errors in the console, and requests to another origin."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.contexts: list[BrowserContext] = []
        self.addresses: set[str] = set()
        self.requested: set[str] = set()
        self.errors: list[str] = []
        self.expected: tuple[str, ...] = ()  # parts of errors that a test provokes

    def __call__(self, address: str, page: Page | None = None, **options: Any) -> Page:
        """Open the page with a storage of its own, or as another tab of `page`."""
        if page is None:
            self.contexts.append(self.browser.new_context(**{"viewport": DESKTOP, **options}))
        opened = (self.contexts[-1] if page is None else page.context).new_page()
        opened.on("console", lambda message: self.note(message.type, message.text))
        opened.on("pageerror", lambda error: self.note("error", str(error)))
        opened.on("request", lambda request: self.requested.add(request.url))
        self.addresses.add(address)
        opened.goto(address)
        return opened

    def note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(part in text for part in self.expected):
            self.errors.append(f"{kind}: {text}")

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        own = tuple(f"{address}/" for address in self.addresses)
        foreign = [url for url in self.requested if not url.startswith((*own, "blob:", "data:"))]
        assert not foreign, foreign
        assert not self.errors, self.errors
