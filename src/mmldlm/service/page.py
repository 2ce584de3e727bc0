"""A local page to try a model: there and back, between two sentences, blanks, paraphrases, neighbours, the latent."""

from __future__ import annotations

import functools
import html
import re
import time
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from typing import Any

import gradio as gr
import numpy as np

from mmldlm.api.model import Model
from mmldlm.api.trace import BLANK, trace_decode
from mmldlm.errors import UserError

SENTENCE, OTHER = "a coil of rope", "the act of lending money to a friend"
LINES = """a length of cord that is wound in rings
a person who plays the violin
the capital of a country
to move through water with the arms and legs
a loan of money that must be paid back
a dark cloud that brings rain"""
POINTS = 9
DRAWS = 64
"""Of each cost that is shown: enough for an error well below a short sentence's cost, at a few seconds on a CPU."""
SECONDS_BETWEEN_STEPS = 0.12
CSS = """
.steps, .latent {padding: 0.6rem 0.2rem; font-size: 1.15rem; line-height: 1.9; overflow-wrap: anywhere}
.steps .mask {display: inline-block; width: 2.4em; height: 1em; margin: 0 0.15em; vertical-align: -0.1em;
  border-radius: 0.3em; background: var(--border-color-primary)}
.steps .new {background: var(--color-accent-soft); border-radius: 0.3em; padding: 0 0.2em}
.steps .past {font-size: 0.85rem; opacity: 0.8}
.result {width: 100%; border-collapse: collapse; font-size: 1rem}
.result, .result tr, .result th, .result td {border: 0 !important}
.result th, .result td {text-align: left; padding: 0.4rem 0.6rem; vertical-align: top; overflow-wrap: break-word;
  border-bottom: 1px solid var(--border-color-primary) !important}
.steps small, .latent small {display: block; color: var(--body-text-color-subdued); font-size: 0.8rem}
.latent svg {width: 100%; height: 2.4rem; display: block; border-radius: 0.3em}
footer {display: none !important}
.gradio-container {width: 100%; max-width: 62rem !important; margin: 0 auto !important}
"""


def build_page(model: Model) -> gr.Blocks:
    """The page of a model."""
    demo = Demonstration(model)
    with gr.Blocks(title="MM-LDLM", analytics_enabled=False) as page:
        latents = f"{model.num_slots} x {model.num_channels}"
        gr.Markdown(
            f"## MM-LDLM\n`{model.source}` · step {model.step} · modes {', '.join(model.modes)} · latent {latents} · "
            f"texts up to {model.max_length} tokens"
        )
        with gr.Tab("There and back"):
            _there_and_back(demo)
        with gr.Tab("Between"):
            _between(demo)
        with gr.Tab("Blanks"):
            text = gr.Textbox("a person who ____ the violin", label="Text; ____ is one token, ____{3} three")
            about = gr.Textbox("", label="Fill it to suit this sentence (may stay empty)")
            _action("Fill", demo.fill, [text, about])
        with gr.Tab("Paraphrase"):
            text = gr.Textbox(OTHER, label="Sentence")
            strength = gr.Slider(0.1, 1.0, 0.5, step=0.1, label="Strength: how far the result may go")
            _action("Paraphrase", demo.paraphrase, [text, strength])
        with gr.Tab("Neighbours"):
            text = gr.Textbox(SENTENCE, label="Sentence")
            among = gr.Textbox(LINES, lines=6, label="Nearest among these lines")
            _action("Find", demo.neighbours, [text, among], table=True)
        with gr.Tab("The latent"):
            text = gr.Textbox(SENTENCE, label="What the latent changes: a sentence")
            other = gr.Textbox(OTHER, label="Somebody else's sentence")
            _action("Compare", demo.compare, [text, other], table=True)
    return page


def _action(label: str, function: Callable[..., Any], inputs: list[Any], *, table: bool = False) -> None:
    button = gr.Button(label, variant="primary")
    output = gr.HTML() if table else gr.Textbox(label="Result", lines=2, interactive=False)
    button.click(_clear(function, draw_note if table else str), inputs, output)


def _there_and_back(demo: Demonstration) -> None:
    text = gr.Textbox(SENTENCE, label="Sentence")
    with gr.Row():
        steps = gr.Slider(1, 32, 8, step=1, label="Steps")
        seed = gr.Slider(0, 99, 0, step=1, label="Seed")
    button = gr.Button("Encode and decode", variant="primary")
    latent, shown = gr.HTML(), gr.HTML()
    button.click(_clear_stream(demo.there_and_back), [text, steps, seed], [latent, shown])


def _between(demo: Demonstration) -> None:
    first, second = gr.Textbox(SENTENCE, label="From"), gr.Textbox(OTHER, label="To")
    share = gr.Slider(0, POINTS - 1, (POINTS - 1) // 2, step=1, label="Drag from one to the other")
    button = gr.Button("Decode", variant="primary")
    result = gr.Textbox(label="Text of the latent between", lines=2, interactive=False)
    for event in (share.release, button.click):
        event(_clear(demo.between, str), [first, second, share], result)


def _clear(function: Callable[..., str], show: Callable[[str], str]) -> Callable[..., str]:
    """A mistake of the user becomes a sentence in place of the result."""

    @functools.wraps(function)
    def call(*values: Any) -> str:
        try:
            return function(*values)
        except UserError as error:
            return show(sentence(error))

    return call


def _clear_stream(function: Callable[..., Iterator[tuple[str, str]]]) -> Callable[..., Any]:
    """The same where the results come one after the other, each of two parts."""

    @functools.wraps(function)
    def stream(*values: Any) -> Iterator[tuple[str, str]]:
        try:
            yield from function(*values)
        except UserError as error:
            yield "", draw_note(sentence(error))

    return stream


def sentence(error: UserError) -> str:
    """What is wrong, without the names of arguments."""
    plain = re.sub(r"^texts\[\d+\](=[^:]*)?: ", "The text ", str(error))
    return f"{plain[0].upper()}{plain[1:].rstrip('.')}."


def require_words(**fields: str) -> None:
    """Reject an empty field of the page, by what stands above it."""
    for name, text in fields.items():
        if not text.strip():
            raise UserError(f"“{name}” is empty; write a sentence there")


class Demonstration:
    """What the page shows, by calls of the model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._decoded = functools.lru_cache(maxsize=32)(self._path)

    def latents(self, texts: list[str]) -> np.ndarray:
        """By the model itself, or by its encoder where it was not trained for that."""
        return self.model.encode(texts) if "t2l" in self.model.modes else self.model.embed(texts)

    def there_and_back(self, text: str, steps: float, seed: float) -> Iterator[tuple[str, str]]:
        """The latent of a sentence, then the text of every step."""
        require_words(Sentence=text)
        latents = self.latents([text])
        strip = draw_latent(latents[0], text)
        yield strip, ""
        states = trace_decode(self.model, latents, steps=int(steps), seed=int(seed))
        for number in range(len(states)):
            yield strip, draw_steps(states[: number + 1])
            time.sleep(SECONDS_BETWEEN_STEPS)

    def _path(self, first: str, second: str) -> list[str]:
        start, end = self.latents([first, second])
        return [str(text) for text in self.model.interpolate(start, end, POINTS).texts]

    def between(self, first: str, second: str, place: float) -> str:
        require_words(From=first, To=second)
        return self._decoded(first, second)[int(place)]

    def fill(self, text: str, about: str) -> str:
        """Blanks filled from the text around them, and to suit a sentence."""
        require_words(Text=text)
        return str(self.model.infill([text], self.latents([about]) if about.strip() else None)[0])

    def paraphrase(self, text: str, strength: float) -> str:
        require_words(Sentence=text)
        return str(self.model.paraphrase(text, strength=strength, latents=self.latents([text])))

    def neighbours(self, text: str, among: str) -> str:
        require_words(**{"Sentence": text, "Nearest among these lines": among})
        lines = [line for line in among.splitlines() if line.strip()]
        near = self.model.neighbours(self.latents([text]), self.latents(lines), k=len(lines))[0]
        rows = [[f"{one.cosine:.3f}", lines[one.index]] for one in near]
        return draw_table(["cosine", "line, nearest first"], rows)

    def compare(self, text: str, other: str) -> str:
        """What the right latent, none, and another one make of a text."""
        require_words(**{"What the latent changes": text, "Somebody else's sentence": other})
        model, both = self.model, self.latents([text, other])
        length = len(model.tokenize([text])[0])
        right, wrong = model.decode(both, lengths=length)
        scores = [
            model.score([text], latents, draws=DRAWS, errors=True) for latents in (both[:1], None, both[1:])
        ]
        texts = [right, model.infill(f"{BLANK}{{{length}}}"), wrong]
        names = ["the right one", "none", "somebody else's"]
        costs = [f"{cost:.2f} ± {error:.2f}" for (cost,), (error,) in scores]
        rows = [[name, str(t), cost] for name, t, cost in zip(names, texts, costs, strict=True)]
        return draw_table(["latent", "decoded, same length and seed", "nats the sentence costs, about"], rows)


def draw_note(text: str) -> str:
    """A sentence in place of a result."""
    return f'<div class="steps">{html.escape(text)}</div>'


def draw_steps(states: list[str]) -> str:
    """Texts of which some tokens are still masked, the newest first and large; new words are marked."""
    lines = [
        f'<div class="{"now" if number == len(states) - 1 else "past"}"><small>step {number}</small>'
        f"{_words(state, states[number - 1] if number else state)}</div>"
        for number, state in enumerate(states)
    ]
    return f'<div class="steps">{"".join(reversed(lines))}</div>'


def _words(state: str, before: str) -> str:
    """The words of a step; those that stand where masks were are marked."""
    words, shown = state.split(), []
    for kind, _, _, start, stop in SequenceMatcher(None, before.split(), words, autojunk=False).get_opcodes():
        for word in words[start:stop]:
            text = html.escape(word)
            new = text if kind == "equal" else f'<span class="new">{text}</span>'
            shown.append('<span class="mask"></span>' if word == BLANK else new)
    return " ".join(shown)


def draw_table(headers: list[str], rows: list[list[str]]) -> str:
    """A table whose cells wrap on a narrow screen."""
    head = "".join(f"<th>{html.escape(word)}</th>" for word in headers)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="result"><tr>{head}</tr>{body}</table>'


def draw_latent(latent: np.ndarray, text: str) -> str:
    """The channels of a latent as a strip: blue below their mean, orange above."""
    values = latent.reshape(-1)
    scale = float(np.abs(values - values.mean()).max()) or 1.0
    bars = "".join(
        f'<rect x="{i}" width="1.05" height="1" fill="{"#e8862e" if v > 0 else "#2e7fe8"}" opacity="{abs(v):.2f}"/>'
        for i, v in enumerate((values - values.mean()) / scale)
    )
    strip = f'<svg viewBox="0 0 {len(values)} 1" preserveAspectRatio="none" role="img" aria-label="latent">{bars}</svg>'
    return f'<div class="latent"><small>latent of “{html.escape(text)}”, {len(values)} numbers</small>{strip}</div>'


def launch_page(model: Model, host: str, port: int, *, token: str = "", block: bool = True) -> Any:
    """Open the page at an address; with a token, the user name is mmldlm and the password the token."""
    theme = gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]).set(
        block_title_background_fill="none", block_title_background_fill_dark="none", block_title_padding="0",
        block_title_text_color="*neutral_600", block_title_text_color_dark="*neutral_300",
    )  # fmt: skip
    return build_page(model).queue(default_concurrency_limit=1).launch(
        server_name=host, server_port=port, share=False, quiet=True, theme=theme, css=CSS, ssr_mode=False,
        auth=("mmldlm", token) if token else None, prevent_thread_lock=not block, footer_links=[],
    )  # fmt: skip
