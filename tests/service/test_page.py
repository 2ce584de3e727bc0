"""The page shows what the model says, and a mistake is a note on it."""

from __future__ import annotations

import importlib
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import mmldlm
from mmldlm.api.model import Model
from mmldlm.api.trace import trace_decode
from tests.browser import Browser
from tests.tiny_models import make_run, make_store

TABS = {
    "Between": ("Decode", "w"),
    "Blanks": ("Fill", "w"),
    "Paraphrase": ("Paraphrase", "w"),
    "Neighbours": ("Find", "nearest first"),
    "The latent": ("Compare", "somebody else's"),
    "There and back": ("Encode and decode", "step 1"),
}
"""Tab -> its button, and what its result shows."""
SHOWN = "[...document.querySelectorAll('textarea, .result, .steps')].filter(one => one.offsetParent)"


@pytest.fixture(scope="module")
def page() -> Any:
    """Imported here: gradio takes seconds, which every process that collects tests would spend."""
    pytest.importorskip("gradio")
    return importlib.import_module("mmldlm.service.page")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("model")
    return mmldlm.load(make_run(root / "run", make_store(root / "store")))


@pytest.mark.parametrize("settings", [{}, {"steps": 4}, {"steps": 3, "seed": 5}])
def test_a_watched_decode_ends_where_the_decode_ends(model: Model, settings: dict[str, int]) -> None:
    latents = model.encode(["w3 w1 w7"])
    states = trace_decode(model, latents, **settings)
    assert states[-1] == model.decode(latents, **settings)[0]
    masked = [state.split().count("____") for state in states]
    assert masked[0] == len(states[0].split())
    assert masked == sorted(masked, reverse=True)
    assert masked[-1] == 0


def test_every_part_of_the_page_answers(model: Model, page: Any) -> None:
    demo = page.Demonstration(model)
    latent, steps = list(demo.there_and_back("w3 w1 w7", 3.0, 0.0))[-1]
    assert latent.count("<rect") == model.num_channels
    assert steps.count("step ") == 4
    ends = model.decode(model.encode(["w3 w1", "w4"]))
    assert [demo.between("w3 w1", "w4", place) for place in (0, 8)] == ends
    assert demo.fill("w3 ____ w1", "").split()[::2] == ["w3", "w1"]
    assert demo.fill("w3 ____ w1", "w4") == model.infill(["w3 ____ w1"], model.encode(["w4"]))[0]
    assert demo.paraphrase("w3 w1 w7", 0.4) == model.paraphrase(
        "w3 w1 w7", strength=0.4, latents=model.encode(["w3 w1 w7"])
    )
    near = demo.neighbours("w4", "w3\n\nw4")
    assert all(f"<td>{word}</td>" in near for word in ("w3", "w4"))
    assert demo.neighbours("w4", "\n".join(f"w{number}" for number in range(8))).count("<td>w") == 8
    costs = re.findall(r"<td>([\d.]+) ± ([\d.]+)</td>", demo.compare("w3 w1", "w4 w5"))
    exact = [model.score("w3 w1", latents, draws=1000)[0] for latents in (model.encode("w3 w1"), None)]
    for (cost, error), expected in zip(costs, exact, strict=False):
        assert float(cost) == pytest.approx(expected, abs=4 * float(error) + 0.02)
        assert 0 < float(error) < 0.2 * expected
    assert len(costs) == 3


def test_a_mistake_is_a_note_and_no_markup_gets_through(model: Model, page: Any) -> None:
    demo = page.Demonstration(model)
    assert "'no blank': holds no blank; write ____" in page._clear(demo.fill, str)("no blank", "")
    empty = list(page._clear_stream(demo.there_and_back)(" ", 2.0, 0.0))
    assert empty == [("", '<div class="steps">“Sentence” is empty; write a sentence there.</div>')]
    for call, values, field in (
        (demo.neighbours, ("w4", " \n"), "Nearest among these lines"),
        (demo.between, ("w4", "", 0.0), "To"),
        (demo.compare, ("", "w4"), "What the latent changes"),
        (demo.paraphrase, (" ", 0.5), "Sentence"),
    ):
        assert page._clear(call, str)(*values) == f"“{field}” is empty; write a sentence there."
    assert page.sentence(mmldlm.UserError("texts[0]='…': holds no token")) == "The text holds no token."
    assert "<script>" not in page.draw_table(["<script>"], [["<script>"]])


def test_the_page_opens_and_asks_for_the_token_where_there_is_one(model: Model, page: Any) -> None:
    for token in ("", "a secret that nobody knows"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        app, address, _ = page.launch_page(model, "127.0.0.1", port, token=token, block=False)
        try:
            content = urllib.request.urlopen(address, timeout=280).read().decode()
            assert ("auth_required" in content) or not token
            assert Path(model.source).name in content or token
        finally:
            app.blocks.close()


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_every_tab_works_in_a_browser(model: Model, size: str, tmp_path: Path, page: Any) -> None:
    """At both widths, light and dark: each button gives a result, nothing scrolls sideways, no script fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app, address, _ = page.launch_page(model, "127.0.0.1", port, block=False)
    try:
        with Browser(tmp_path / "profile") as browser:
            browser.open(address, size, dark=True)
            browser.wait_for("document.querySelector('button[role=tab]') != null")
            dark = browser.ask("getComputedStyle(document.body).backgroundColor")
            browser.open(address, size)
            browser.wait_for("document.querySelector('button[role=tab]') != null")
            assert browser.ask("getComputedStyle(document.body).backgroundColor") != dark
            for tab, (button, result) in TABS.items():
                _use(browser, tab, button, result)
                assert browser.overflow <= 0, tab
            assert browser.problems == []
    finally:
        app.blocks.close()


def _use(browser: Browser, tab: str, button: str, result: str) -> None:
    """Press the button of a tab and wait for its result. A tab that does not fit is in a menu of tabs."""

    def thing(selector: str, name: str) -> str:
        visible = f"one => one.innerText.trim() == {name!r} && one.offsetParent"
        return f"[...document.querySelectorAll('{selector}')].find({visible})"

    tabs = "[role=tab], .overflow-dropdown button"
    if browser.ask(f"{thing(tabs, tab)} == null"):
        browser.ask("document.querySelector('.overflow-menu button').click()")
    browser.ask(f"{thing(tabs, tab)}.click()")
    browser.wait_for(f"{thing('button.primary', button)} != null")
    browser.ask(f"{thing('button.primary', button)}.click()")
    browser.wait_for(f"{SHOWN}.some(one => (one.value ?? one.innerText).includes({result!r}))")
