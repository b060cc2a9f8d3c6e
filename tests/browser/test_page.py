"""The page of `nextscale serve` as people meet it: a real browser, a real server, the embedded model.

Screenshots go to the folder NEXTSCALE_SCREENSHOTS, if it is set; then they show a larger image, which takes longer.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import DESKTOP, KEY, Opener
from PIL import Image

from nextscale.methods.auto import best_method

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Download, Page, Route

FAST, SIZE = "truncate:4", "256x256"  # 6 of 10 scales
PROMPT = "two foxes above a blue heart"
DONE = 90_000  # milliseconds that an image may take on a busy machine
PHONE = {"width": 390, "height": 844}


def fill(page: Page, prompt: str = PROMPT, method: str = FAST, seed: int | None = 7, size: str = SIZE) -> None:
    page.locator("#method option").first.wait_for(state="attached")
    if page.locator("#settings").get_attribute("open") is None:
        page.locator("#settings > summary").click()
    page.fill("#prompt", prompt)
    page.select_option("#size", size)
    offered = page.locator("#method option").evaluate_all("all => all.map(option => option.value)")
    page.select_option("#method", method if method in offered else "custom")
    if method not in offered:
        page.fill("#custom", method)
    if seed is not None:
        page.fill("#seed", str(seed))


def generate(page: Page, button: str = "#generate", **settings: Any) -> None:
    fill(page, **settings)
    page.click(button)
    finished(page)


def finished(page: Page) -> None:
    page.locator("#cancel").wait_for(state="hidden", timeout=DONE)
    assert page.locator("#error").is_hidden(), page.locator("#error").inner_text()
    page.locator("#download").wait_for()


def downloaded(page: Page, link: str = "#download") -> bytes:
    with page.expect_download() as found:
        page.click(link)
    download: Download = found.value
    return Path(download.path()).read_bytes()


def asked(server: str, **body: Any) -> bytes:
    """The image that the API makes of the same request without a stream."""
    body = {"prompt": PROMPT, "size": SIZE, "method": FAST, "seed": 7, **body}
    with send(server, body) as response:
        return base64.b64decode(json.load(response)["data"][0]["b64_json"])


def send(server: str, body: dict[str, Any], key: str = KEY) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    url = f"{server}/v1/images/generations"
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=DONE / 1000)


def metric(server: str, name: str) -> float:
    with urllib.request.urlopen(f"{server}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def wait_for(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


class Models:
    """Three models: the server's own, and two that are the same under another name and with a single size."""

    sizes = {"beta": "256x256", "gamma": "384x384"}

    def __init__(self, page: Page, server: str) -> None:
        self.own = fetched(f"{server}/v1/models")["data"][0]["id"]
        self.info = fetched(f"{server}/v1/models/{self.own}")
        self.methods = fetched(f"{server}/v1/methods?model={self.own}")
        self.slow = "-"  # requests with this part in their address wait
        self.waiting: list[Route] = []
        names = [{"id": name} for name in (self.own, *self.sizes)]
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": names}))
        page.route(re.compile("/v1/(models/|methods)"), self.answer)
        page.reload()
        page.locator("#size option").first.wait_for(state="attached")

    def answer(self, route: Route) -> None:
        if self.slow in route.request.url:
            self.waiting.append(route)
        elif "methods" in route.request.url:
            route.fulfill(json=self.methods)
        else:
            size = self.sizes.get(route.request.url.rsplit("/", 1)[1])
            single = {"sizes": [size], "trained_sizes": [size], "default_size": size} if size else {}
            route.fulfill(json={**self.info, "nextscale": {**self.info["nextscale"], **single}})

    def release(self) -> None:
        self.slow = "-"
        for route in self.waiting:
            self.answer(route)


@pytest.fixture(scope="module")
def compared(browser: Browser, server: str) -> Iterator[Page]:
    """A page with a finished comparison, its map, and everything unfolded. Tests leave it as it is."""
    opener = Opener(browser)
    page = opener(server)
    generate(page, "#compare", method="fastvar:fast")
    page.check("#show-map")
    page.locator("#form details").evaluate_all("all => all.forEach((details) => (details.open = true))")
    yield page
    opener.close()


# ---- making images ----


def test_previews_arrive_in_order(open_page: Opener, server: str) -> None:
    page = open_page(server)
    page.evaluate("""() => {
        window.seen = [];
        const image = document.getElementById("image-made");
        const note = () => image.src && window.seen.push([Number(image.dataset.scale), image.src]);
        new MutationObserver(note).observe(image, { attributes: true });
    }""")
    generate(page)
    seen = page.evaluate("window.seen")
    scales = [scale for scale, _ in seen]
    assert scales == sorted(scales)
    assert set(scales) == {1, 2, 3, 4, 5, 6}
    assert len({src for _, src in seen}) == 7  # the previews of six scales, and the image itself
    tokens = page.locator("#scale-row label span").all_inner_texts()
    grids = page.locator("#scale-row label b").all_inner_texts()
    cells = [int(height) * int(width) for height, width in (grid.split("×") for grid in grids)]
    assert tokens == [str(n) for n in cells[:6]] + ["left out"] * 4


def test_the_image_is_that_of_the_api(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page)
    image = downloaded(page)
    assert image == asked(server)
    settings = json.loads(Image.open(io.BytesIO(image)).text["nextscale"])
    assert (settings["prompt"], settings["seed"], settings["method"], settings["size"]) == (PROMPT, 7, FAST, SIZE)


def test_advanced_settings_reach_the_image(open_page: Opener, server: str) -> None:
    page = open_page(server)
    fill(page)
    page.click("text=Advanced")
    page.fill("#guidance", "2,5")
    page.fill("#negative", "a red star")
    page.click("#generate")
    finished(page)
    assert downloaded(page) == asked(server, guidance_scale=2.5, negative_prompt="a red star")


def test_without_previews(open_page: Opener, server: str) -> None:
    page = open_page(server)
    fill(page)
    page.click("text=Advanced")
    page.uncheck("#previews")
    before = metric(server, "nextscale_previews_made_total")
    page.click("#compare")
    finished(page)
    assert metric(server, "nextscale_previews_made_total") == before
    assert page.locator("#scales").is_hidden()
    assert downloaded(page) == asked(server)


def test_a_quality_chooses_the_method(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page, method="quality:low")
    assert best_method("clipart", "fast") in page.locator("#numbers").inner_text()


def test_seeds(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page, seed=None)
    drawn = page.input_value("#seed")
    assert page.is_checked("input[value=random]")
    page.check("input[value=next]", force=True)
    page.click("#generate")
    finished(page)
    assert int(page.input_value("#seed")) == int(drawn) + 1
    page.fill("#seed", "41")  # who types a seed wants it
    assert page.is_checked("input[value=keep]")
    page.click("#generate")
    finished(page)
    assert page.input_value("#seed") == "41"
    page.fill("#seed", "-1")
    page.click("#generate")
    assert "whole number" in page.locator("#error").inner_text()


def test_cancel_reaches_the_server(open_page: Opener, server: str) -> None:
    page = open_page(server)
    before = metric(server, "nextscale_requests_canceled_total")
    fill(page, method="none", size="512x512")
    page.click("#generate")
    page.locator("#scale-row .made").first.wait_for(timeout=DONE)
    page.keyboard.press("Escape")
    page.locator("#cancel").wait_for(state="hidden")
    assert page.locator("#live").inner_text() == "Canceled."
    assert page.locator("#error").is_hidden()
    wait_for(lambda: metric(server, "nextscale_requests_canceled_total") == before + 1)
    wait_for(lambda: metric(server, "nextscale_images_running") == 0)


def test_a_second_press_while_loading_starts_nothing(open_page: Opener, server: str) -> None:
    open_page.expected = ("status of 503",)
    page = open_page(server)
    loading = True
    started = []

    def health(route: Route) -> None:
        if loading:
            route.fulfill(status=503, json={"status": "loading"})
        else:
            route.continue_()

    page.route("**/health", health)
    page.on("request", lambda request: request.method == "POST" and started.append(request.url))
    page.reload()
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.locator("#note", has_text="The model is loading").wait_for()
    loading = False
    page.locator("#cancel").wait_for()
    page.wait_for_timeout(1500)
    page.keyboard.press("Escape")
    page.locator("#cancel").wait_for(state="hidden")
    assert len(started) == 1


@pytest.mark.parametrize("slow", ["models/beta", "methods?model=beta"])
def test_the_model_chosen_last_wins(open_page: Opener, server: str, slow: str) -> None:
    page = open_page(server)
    models = Models(page, server)
    models.slow = slow
    with page.expect_request(lambda request: slow in request.url):
        page.select_option("#model", "beta")
    page.select_option("#model", "gamma")
    page.locator("#size option[value='384x384']").wait_for(state="attached")
    models.release()
    page.wait_for_timeout(500)
    assert page.input_value("#model") == "gamma"
    assert page.locator("#size option").evaluate_all("all => all.map(option => option.value)") == ["384x384"]


def test_comparison(compared: Page) -> None:
    page = compared
    assert "than plain, with" in page.locator("#subline").inner_text()
    rows = page.locator("#numbers tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["Plain", "fastvar:fast"]
    slider = page.get_by_role("slider")
    slider.focus()
    before = page.locator("#divider").bounding_box()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    after = page.locator("#divider").bounding_box()
    assert before
    assert after
    assert after["x"] > before["x"] + 40
    assert slider.get_attribute("aria-valuetext") == "60 % plain, 40 % fastvar:fast"
    for _ in range(10):
        page.keyboard.press("ArrowLeft")


def test_a_comparison_needs_a_method(open_page: Opener, start_server: Callable[..., str]) -> None:
    page = open_page(start_server("--method", "nova:balanced"))
    fill(page, method="none")
    page.click("#compare")
    assert "choose a method first" in page.locator("#error").inner_text()
    fill(page, method="")  # the default needs more scales than so small an image has
    page.click("#compare")
    page.locator("#error", has_text="this is the plain image").wait_for(timeout=DONE)
    assert page.locator("#download").is_visible()


def test_what_was_made_is_compared_later(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page)
    before = metric(server, "nextscale_images_finished_total")
    page.click("#compare")
    finished(page)
    assert metric(server, "nextscale_images_finished_total") == before + 1  # the plain one only
    assert downloaded(page, "#download-plain") == asked(server, method="none")
    assert page.locator("#images li").count() == 1


def test_each_scale_can_be_looked_at(compared: Page) -> None:
    page = compared
    last = page.locator("#image-made").get_attribute("src")
    page.get_by_role("radio", name="Scale 5:").check(force=True)
    assert page.locator("#image-made").get_attribute("data-scale") == "5"
    assert page.locator("#image-plain").get_attribute("data-scale") == "5"
    assert page.locator("#image-made").get_attribute("src") != last
    assert page.locator("#map").get_attribute("aria-label").startswith("Scale 5,")
    page.locator("#scale-row input:enabled").last.check(force=True)
    assert page.locator("#image-made").get_attribute("src") == last


def test_the_map_shows_what_was_computed(compared: Page) -> None:
    """Its veil is as strong as the share of cells that were left out."""
    label = compared.locator("#scale-row label", has_text="%").first
    computed = int(label.inner_text().split("· ")[1].removesuffix(" %"))
    assert 0 < computed < 100
    label.get_by_role("radio").check(force=True)
    veil = compared.locator("#map").evaluate("""map => {
        const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
        return data.filter((_, i) => i % 4 === 3).reduce((sum, alpha) => sum + alpha, 0) / (data.length / 4) / 200;
    }""")
    compared.locator("#scale-row input:enabled").last.check(force=True)
    assert abs(100 * (1 - veil) - computed) < 1.5


# ---- refusals ----


def test_errors_are_sentences(open_page: Opener, server: str) -> None:
    open_page.expected = ("status of 400",)
    page = open_page(server)
    page.locator("#method option").first.wait_for(state="attached")
    page.click("#generate")
    alert = page.get_by_role("alert")
    assert alert.inner_text() == "Say first what should appear."
    fill(page, prompt="qwertz")
    page.click("#generate")
    alert.filter(has_text="names nothing that this model can draw").wait_for()
    assert alert.inner_text().startswith("The prompt")
    assert page.locator("#empty").is_visible()
    fill(page, method="nova:t_est=many")
    page.click("#generate")
    alert.filter(has_text="t_est").wait_for()


def test_unknown_words_are_named(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page, prompt="a red star and a foks")
    warning = page.locator("#warnings li", has_text="Left out, because the model does not know them: 'foks'")
    warning.wait_for()
    assert "foks" in page.locator("#live").inner_text()


def test_a_server_that_is_gone(open_page: Opener, server: str) -> None:
    open_page.expected = ("ERR_FAILED",)
    page = open_page(server)
    fill(page)
    page.route("**/v1/images/generations", lambda route: route.abort())
    page.click("#generate")
    page.get_by_role("alert").filter(has_text="The server does not answer").wait_for()


def test_a_connection_that_breaks_is_said(open_page: Opener, server: str) -> None:
    page = open_page(server)
    fill(page)
    page.evaluate("""() => {
        const start = (stream) => (window.cut = () => stream.error(new TypeError("network error")));
        window.fetch = async () => new Response(new ReadableStream({ start }));
    }""")
    page.click("#generate")
    page.locator("#subline", has_text="waiting for the first scale").wait_for()
    page.evaluate("cut()")
    page.get_by_role("alert").filter(has_text="The connection ended before the image was finished.").wait_for()


def test_loading(open_page: Opener, server: str) -> None:
    open_page.expected = ("status of 503",)
    page = open_page(server)
    fill(page)
    states = iter(["loading", "loading"])

    def refuse(route: Any) -> None:
        state = next(states, None)
        if state is None:
            route.continue_()
        else:
            route.fulfill(status=503, json={"status": state, "error": {"message": state, "code": "loading"}})

    page.route("**/health", refuse)
    error = {"error": {"message": "still loading", "type": "server_error", "param": None, "code": "loading"}}
    page.route("**/v1/images/generations", lambda route: route.fulfill(status=503, json=error), times=1)
    page.click("#generate")
    page.locator("#note", has_text="The model is loading").wait_for()
    finished(page)


def test_key_and_full_queue(open_page: Opener, small_server: str) -> None:
    open_page.expected = ("status of 401", "status of 429")
    page = open_page(small_server)
    dialog = page.get_by_role("dialog", name="This server asks for an API key")
    dialog.wait_for()
    page.keyboard.insert_text("ключ")  # no header can hold it
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelector('#key:invalid') && document.activeElement.id") == "key"
    page.fill("#key", "")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    dialog.locator("#key:invalid").wait_for()  # asked again: what is required is empty
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    fill(page)
    assert page.evaluate("JSON.stringify(localStorage)").find(KEY) < 0
    with busy(small_server):
        page.click("#generate")
        page.locator("#note", has_text="The queue is full; trying again in").wait_for()
        assert page.locator("#live").inner_text().startswith("The queue is full; trying again in")
        page.click("#cancel")
        page.locator("#note", has_text="Canceled.").wait_for()
        page.click("#generate")
        page.locator("#note", has_text="The queue is full").wait_for()
    finished(page)  # by itself


REFUSAL = {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": None}}


def test_cancel_before_the_page_begins_to_wait(open_page: Opener, server: str) -> None:
    open_page.expected = ("status of 429",)
    page = open_page(server)
    fill(page)
    page.route(
        "**/v1/images/generations",
        lambda route: route.fulfill(status=429, headers={"retry-after": "90"}, json=REFUSAL),
    )
    page.evaluate("Response.prototype.json = async () => (document.getElementById('cancel').click(), {})")
    page.click("#generate")
    page.locator("#note", has_text="Canceled.").wait_for()


def test_waiting_leaves_no_listeners(open_page: Opener, server: str) -> None:
    open_page.expected = ("status of 429",)
    page = open_page(server)
    page.evaluate("""() => {
        window.counts = { addEventListener: 0, removeEventListener: 0 };
        for (const name in window.counts)
            AbortSignal.prototype[name] = function (...given) {
                window.counts[name] += 1;
                EventTarget.prototype[name].apply(this, given);
            };
    }""")
    page.route(
        "**/v1/images/generations",
        lambda route: route.fulfill(status=429, headers={"retry-after": "2"}, json=REFUSAL),
        times=1,
    )
    generate(page)
    assert page.evaluate("window.counts") == {"addEventListener": 2, "removeEventListener": 2}


@contextlib.contextmanager
def busy(server: str) -> Iterator[None]:
    """One long image runs and another waits; both clients leave in the end."""
    body = {"prompt": PROMPT, "method": "none", "stream": True, "partial_images": 0}
    open_streams: list[Any] = []
    for number in (1, 2):
        open_streams.append(send(server, body))
        running = "nextscale_images_running" if number == 1 else "nextscale_queue_length"
        wait_for(lambda name=running: metric(server, name) == 1)
    try:
        yield
    finally:
        for stream in open_streams:
            stream.close()


# ---- history ----


def test_history_survives_a_reload(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page)
    first = downloaded(page)
    generate(page, prompt="a red star", seed=8)
    page.reload()
    page.locator("#images li").nth(1).wait_for()
    page.get_by_role("button", name=f"Show again: {PROMPT}, seed 7, {FAST}").click()
    page.locator("#image-made").wait_for()
    assert page.input_value("#prompt") == PROMPT
    assert page.input_value("#seed") == "7"
    assert page.input_value("#size") == SIZE
    assert page.input_value("#custom") == FAST
    assert downloaded(page) == first
    page.get_by_role("radio", name="Scale 3:").check(force=True)  # the previews are there, too
    assert page.locator("#image-made").get_attribute("data-scale") == "3"
    page.get_by_role("button", name="Delete: a red star").click()
    page.locator("#images li").nth(1).wait_for(state="detached")
    page.click("text=Delete all")
    page.get_by_role("button", name="Delete all").last.click()
    page.locator("#history").wait_for(state="hidden")
    page.reload()
    page.locator("#examples button").first.wait_for()
    assert page.locator("#images li").count() == 0


def store_copies(page: Page, count: int, size: int = 0) -> None:
    """Store copies of the first image; those with a size claim to have a preview of so many bytes."""
    page.evaluate(
        """async ([count, size]) => {
        const opened = indexedDB.open("nextscale");
        await new Promise((resolve) => (opened.onsuccess = resolve));
        const images = opened.result.transaction("images", "readwrite").objectStore("images");
        const all = images.getAll();
        await new Promise((resolve) => (all.onsuccess = resolve));
        const { id, ...copy } = all.result[0];
        if (size) copy.made.steps = [{ blob: { size } }];
        for (let i = 0; i < count; i++) images.add(copy);
        await new Promise((resolve) => (images.transaction.oncomplete = resolve));
    }""",
        [count, size],
    )


@pytest.mark.parametrize(("count", "size", "kept"), [(40, 0, 30), (6, 60_000_000, 4)])
def test_history_is_bounded(open_page: Opener, server: str, count: int, size: int, kept: int) -> None:
    """In images and in bytes: 200 MB are three copies of 60 MB and the new image."""
    page = open_page(server)
    generate(page)
    store_copies(page, count, size)
    generate(page, seed=9)
    assert page.locator("#images li").count() == kept
    assert "seed 9" in (page.locator("#images button").first.get_attribute("aria-label") or "")


def test_a_full_storage_is_said(open_page: Opener, server: str) -> None:
    page = open_page(server)
    fill(page)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Storage.overrideQuotaForOrigin", {"origin": server, "quotaSize": 1000})
    page.click("#generate")
    page.get_by_role("alert").filter(has_text="the browser's storage is full").wait_for(timeout=DONE)
    page.locator("#download").wait_for()
    page.locator("#cancel").wait_for(state="hidden")
    assert page.locator("#images li").count() == 0


def test_a_broken_history_is_said(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page)
    page.evaluate("""() => {
        const fail = () => { throw new Error("the disk is gone"); };
        Object.assign(IDBObjectStore.prototype, { delete: fail, clear: fail, getAll: fail });
    }""")
    alert = page.get_by_role("alert")
    page.get_by_role("button", name="Delete: ").click()
    alert.filter(has_text="The image could not be deleted: the disk is gone.").wait_for()
    page.click("#clear")
    page.get_by_role("dialog").get_by_role("button", name="Delete all").click()
    alert.filter(has_text="The history could not be deleted: the disk is gone.").wait_for()
    page.evaluate("new BroadcastChannel('nextscale-history').postMessage('changed')")  # as another tab does
    alert.filter(has_text="The history could not be read: the disk is gone.").wait_for()


def test_an_image_is_shown_again_without_its_model(open_page: Opener, server: str) -> None:
    open_page.expected = ("ERR_FAILED",)
    page = open_page(server)
    generate(page)
    image = downloaded(page)
    models = Models(page, server)
    page.select_option("#model", "beta")
    page.locator("#size option[value='256x256']").wait_for(state="attached")
    page.route(f"**/v1/models/{models.own}", lambda route: route.abort())
    page.locator("#images button").first.click()
    page.get_by_role("alert").filter(has_text="The server does not answer").wait_for()
    assert downloaded(page) == image


def test_what_is_shown_again_is_made_again(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page, seed=None)
    first, seed = downloaded(page), page.input_value("#seed")
    generate(page, seed=None)
    assert page.input_value("#seed") != seed
    page.locator("#images li").nth(1).get_by_role("button", name="Show again").click()
    page.locator("input[value=keep]:checked").wait_for(state="attached")
    assert page.input_value("#seed") == seed
    page.click("#generate")
    finished(page)
    assert downloaded(page) == first


def test_the_focus_stays_in_the_history(open_page: Opener, server: str) -> None:
    one = open_page(server)
    generate(one, seed=1)
    generate(one, seed=2)
    label = "document.activeElement.ariaLabel"
    one.get_by_role("button", name="Show again").nth(1).focus()
    two = open_page(server, page=one)
    generate(two, seed=3)
    one.locator("#images li").nth(2).wait_for()
    assert one.evaluate(label) == f"Show again: {PROMPT}, seed 1, {FAST}"
    one.keyboard.press("Shift+Tab")
    one.keyboard.press("Enter")
    one.locator("#images li").nth(2).wait_for(state="detached")
    assert one.evaluate(label) == f"Show again: {PROMPT}, seed 1, {FAST}"  # the next one took the place of seed 2
    one.keyboard.press("Tab")
    one.keyboard.press("Enter")
    one.locator("#images li").nth(1).wait_for(state="detached")
    assert one.evaluate(label) == f"Show again: {PROMPT}, seed 3, {FAST}"  # the last one has a neighbor before it


def test_two_tabs(open_page: Opener, server: str) -> None:
    one = open_page(server)
    two = open_page(server, page=one)
    fill(one)
    fill(two, prompt="a red star", seed=8)
    one.click("#generate")
    two.click("#generate")
    finished(one)
    finished(two)
    assert downloaded(one) == asked(server)
    assert downloaded(two) == asked(server, prompt="a red star", seed=8)
    for page in (one, two):  # each knows what the other made
        page.locator("#images li").nth(1).wait_for()


DENIED = """
    const fail = () => { throw new DOMException("denied", "SecurityError"); };
    for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, { get: fail });
    window.BroadcastChannel = fail;
"""


def test_a_browser_that_keeps_nothing(open_page: Opener, small_server: str) -> None:
    """With all cookies of a site blocked, its storage throws."""
    open_page.expected = ("status of 401",)
    page = open_page(small_server)
    page.context.add_init_script(DENIED)
    page.reload()
    page.get_by_role("dialog", name="This server asks for an API key").wait_for()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.click("#theme")
    generate(page)
    assert page.locator("#history").is_hidden()


# ---- words and code ----


def test_completion(open_page: Opener, server: str) -> None:
    page = open_page(server)
    page.locator("#prompt[aria-controls=words]").wait_for()
    prompt = page.get_by_role("textbox", name="Prompt", exact=True)
    prompt.click()
    prompt.press_sequentially("two ted")
    options = page.locator("#words").get_by_role("option")
    assert options.all_inner_texts() == ["teddy bear\nobjects"]
    assert page.get_by_role("status").inner_text() == "1 known word, ↓ to choose."
    page.keyboard.press("ArrowDown")
    chosen = prompt.get_attribute("aria-activedescendant")
    assert page.locator(f"#{chosen}").get_attribute("aria-selected") == "true"
    page.keyboard.press("Enter")
    assert prompt.input_value() == "two teddy bear "
    assert page.locator("textarea[role], textarea[aria-expanded]").count() == 0  # a textbox has neither
    prompt.press_sequentially("ab")
    options.first.wait_for()
    page.keyboard.press("Escape")
    assert options.count() == 0
    prompt.fill("a penguin in the snow")
    options.first.wait_for(state="hidden")  # nothing lies over the buttons once a word is known
    prompt.fill("")
    page.keyboard.press("ArrowDown")  # all words
    assert options.count() > 300
    options.filter(has_text="penguin").click()
    assert prompt.input_value() == "penguin "


def test_copied_code_works(open_page: Opener, server: str, tmp_path: Path) -> None:
    page = open_page(server, permissions=["clipboard-read", "clipboard-write"])
    prompt = "a fox's “star”\n$(touch hacked) `touch hacked` \\ a red heart"
    generate(page, prompt=prompt)
    expected = downloaded(page)
    for button in ("curl", "Python"):
        page.click(f"text=Copy as {button}")
        page.locator("#note", has_text=f"Copied as {button}").wait_for()
        code = page.evaluate("navigator.clipboard.readText()")
        folder = tmp_path / button
        folder.mkdir()
        if button == "Python":
            pytest.importorskip("openai", reason="the copied code needs the openai package")
        command = ["bash", "-e", "-o", "pipefail", "-c", code] if button == "curl" else [sys.executable, "-c", code]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DONE / 1000)
        assert result.returncode == 0, result.stderr
        (file,) = folder.iterdir()
        assert file.suffix == ".png"
        assert file.read_bytes() == expected


def test_code_without_a_clipboard(open_page: Opener, server: str) -> None:
    page = open_page(server)
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }")
    generate(page)
    page.click("text=Copy as curl")
    page.get_by_role("dialog", name="Copy this text").wait_for()
    assert page.input_value("#text").startswith("curl ")
    page.keyboard.press("Escape")


# ---- safety ----

STRICT = (
    "default-src 'none'; connect-src 'self'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


def test_strict_policy(open_page: Opener, server: str) -> None:
    """What the browser refuses would be an error in the console."""
    page = open_page(server)

    def answer(route: Any) -> None:
        response = route.fetch()
        route.fulfill(response=response, headers={**response.headers, "content-security-policy": STRICT})

    page.route(f"{server}/", answer)
    page.reload()
    generate(page, "#compare")
    page.click("text=Delete all")
    page.get_by_role("button", name="Keep them").click()
    downloaded(page)


def test_nothing_sent_is_read_as_html(open_page: Opener, server: str) -> None:
    page = open_page(server)
    generate(page, prompt="a red star <img src=x onerror=alert(1)>")
    page.reload()
    page.locator("#images button").first.click()
    page.locator("#download").wait_for()
    assert page.locator("img[src=x]").count() == 0


# ---- for everybody ----


def test_keyboard_alone(open_page: Opener, server: str) -> None:
    page = open_page(server)
    fill(page)
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    finished(page)
    page.locator("#seed").focus()
    page.keyboard.press("Control+Enter")  # from anywhere
    finished(page)
    assert page.locator("#images li").count() == 2


def test_every_control_is_reached_by_tab(compared: Page) -> None:
    """In a group of radio buttons one is reached, and the arrows move on."""
    expected = compared.evaluate("""() => {
        const all = document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']");
        const seen = [...all].filter((element) => element.checkVisibility() && !element.disabled);
        window.controls = seen.filter((element) => element.type !== "radio" || element.checked);
        document.activeElement.blur();
        return window.controls.length;
    }""")
    compared.locator("header").click(position={"x": 400, "y": 5})
    reached = set()
    for _ in range(expected + 5):
        compared.keyboard.press("Tab")
        reached.add(compared.evaluate("window.controls.indexOf(document.activeElement)"))
    missing = compared.evaluate(
        "at => window.controls.filter((_, i) => !at.includes(i)).map(e => e.outerHTML)", [*reached]
    )
    assert not missing
    assert expected >= 25


def test_every_control_has_a_name(compared: Page) -> None:
    tree = compared.context.new_cdp_session(compared).send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox", "listbox", "radio", "checkbox", "switch", "slider", "link"}
    roles |= {"image", "img", "progressbar", "DisclosureTriangle", "group", "radiogroup", "dialog", "option", "table"}
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    nameless = [role for role, name in found if role in roles - {"group", "table"} and not name.strip()]
    assert not nameless
    assert {"button", "combobox", "radio", "switch", "slider", "link"} <= {role for role, _ in found}


CONTRAST = """() => {
    const parse = (text) => {
        const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
        return text.startsWith("color(srgb") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
    const light = (color) => {
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = color.map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const behind = (element) => {
        const layers = [];
        for (let e = element; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
        return layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
    };
    const problems = [];
    for (const element of document.body.querySelectorAll("*")) {
        if (!element.checkVisibility({ opacityProperty: true })) continue;
        if (element.closest("[aria-disabled=true], svg")) continue;
        const style = getComputedStyle(element);
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        const field = element.matches("input:not([type=radio], [type=range], [type=checkbox]), select, textarea");
        const name = element.id || element.className || element.textContent.slice(0, 30);
        const describe = (what, value, least) =>
            value < least - 0.005 && problems.push(`${what} ${value.toFixed(2)} < ${least}: ${name}`);
        if (own || field) {
            const size = parseFloat(style.fontSize);
            const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
            const background = behind(element);
            describe("text", ratio(over(parse(style.color), background), background), large ? 3 : 4.5);
        }
        if (field) {
            const around = behind(element.parentElement);
            describe("edge", ratio(over(parse(style.borderTopColor), around), around), 3);
        }
        if (element.matches("button, .button, .segments, .segments :checked + span, .switch input")) {
            const around = behind(element.parentElement);
            const fill = behind(element);
            const border = parseFloat(style.borderTopWidth) > 0 ? parse(style.borderTopColor) : [0, 0, 0, 0];
            const bare = !border[3] && !parse(style.backgroundColor)[3]; // words or an icon alone
            if (!bare) describe("edge", Math.max(ratio(over(border, around), around), ratio(fill, around)), 3);
            if (element.matches("input"))
                describe("knob", ratio(parse(getComputedStyle(element, "::before").backgroundColor), fill), 3);
        }
    }
    return problems;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(compared: Page, open_page: Opener, server: str, theme: str) -> None:
    compared.emulate_media(color_scheme=theme, reduced_motion="reduce")
    compared.locator(f"html[data-theme={theme}]").wait_for(state="attached")  # the page is told of it by an event
    compared.click("#clear")  # a dialog
    assert compared.evaluate(CONTRAST) == []
    compared.keyboard.press("Escape")
    compared.hover("#images li")  # its button to delete
    assert compared.evaluate(CONTRAST) == []
    page = open_page(server, color_scheme=theme, reduced_motion="reduce")
    page.locator("#examples button").first.wait_for()
    page.locator("#form details").evaluate_all("all => all.forEach((details) => (details.open = true))")
    page.uncheck("#previews")
    page.click("#generate")  # an error
    page.locator("#prompt").press_sequentially("f")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(CONTRAST) == []


def test_the_theme_can_be_chosen(open_page: Opener, server: str) -> None:
    page = open_page(server, color_scheme="light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.reload()
    assert page.get_by_role("button", name="Dark theme").get_attribute("aria-pressed") == "true"


def test_no_sideways_scrolling_on_a_phone(compared: Page, open_page: Opener, server: str) -> None:
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    compared.set_viewport_size({"width": 360, "height": 700})
    assert compared.evaluate(wide) == 0
    compared.set_viewport_size(DESKTOP)
    page = open_page(server, viewport={"width": 360, "height": 700})
    page.locator("#examples button").first.wait_for()
    assert page.evaluate(wide) == 0


def test_the_image_is_in_sight_on_a_phone(open_page: Opener, server: str) -> None:
    page = open_page(server, viewport={"width": 360, "height": 700})
    fill(page)  # unfolds the settings
    page.click("#generate")
    page.locator("#facts").wait_for()
    box = page.locator("#canvas").bounding_box()
    assert box
    assert box["y"] >= 0
    assert box["y"] + box["height"] < 701
    finished(page)


def test_motion_can_be_reduced(open_page: Opener, server: str) -> None:
    page = open_page(server, reduced_motion="reduce")
    moving = (
        "[...document.querySelectorAll('*')].filter(e => parseFloat(getComputedStyle(e).transitionDuration) > 0).length"
    )
    assert page.evaluate(moving) == 0


def test_screenshots(open_page: Opener, server: str, tmp_path: Path) -> None:
    """Screenshots for people to look at; a test sees only that there are some."""
    chosen = os.environ.get("NEXTSCALE_SCREENSHOTS")
    folder = Path(chosen or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page = open_page(server, color_scheme="light", reduced_motion="reduce")
    page.locator("#examples button").first.wait_for()
    shoot(page, folder, "empty")
    settings = {"method": "nova:fast"}
    if chosen:
        settings = {"method": "nova:balanced", "size": "512x512", "prompt": "three parrots on a beach"}
    generate(page, "#compare", **settings)
    shoot(page, folder, "comparison")
    page.check("#show-map")
    shoot(page, folder, "map")
    assert len(list(folder.glob("*.png"))) >= 12


def shoot(page: Page, folder: Path, name: str) -> None:
    for device, size in (("desktop", DESKTOP), ("phone", PHONE)):
        for theme in ("light", "dark"):
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=theme)
            page.screenshot(path=folder / f"{name}-{device}-{theme}.png", full_page=device == "phone")
    page.set_viewport_size(DESKTOP)
