"""Reports as one HTML file that needs nothing else. Templates are in `templates/`; everything from data is escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mmldlm.pictures import Picture
from mmldlm.tables import Table

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@dataclass(frozen=True)
class Card:
    """A headline number."""

    value: str
    what: str
    detail: str


def render_page(
    title: str,
    *,
    intro: Sequence[str] = (),
    cards: Sequence[Card] = (),
    notes: Sequence[str] = (),
    pictures: Sequence[Picture] = (),
    tables: Sequence[Table] = (),
    command: str | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
    template: str = "page.html",
    **more: Any,
) -> bytes:
    """The page in UTF-8; `more` are the variables of a template that extends the base."""
    page = _environment().get_template(template)
    text = page.render(
        title=title, intro=intro, cards=cards, notes=notes, pictures=pictures, tables=tables, command=command,
        details=details or {}, **more,
    )  # fmt: skip
    return text.encode("utf-8", "replace")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mmldlm"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"flat": _flat, "inline": _inline}
    return environment


def _inline(text: str) -> Markup:
    """Words in backticks as code; everything is escaped."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_flat(item)}" for key, item in value.items())
    return ", ".join(map(_flat, value)) if isinstance(value, list | tuple) else str(value)
