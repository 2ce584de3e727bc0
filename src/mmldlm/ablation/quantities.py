"""Which measured quantities become columns: names that an evaluation has, and the default choice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mmldlm.errors import UserError

_SCORES = "(token_accuracy|token_f1|exact_match|bleu|reencoded_cosine|right_length)"
_NAMES = (
    r"(text_bound|bits_per_byte|bits_per_character|latent_bound)/(right|shuffled|none)",
    r"calibration/(right|shuffled|none)/(equal_width|equal_mass)",
    r"(text_gain|latent_gain)/(shuffled|none)",
    r"decode/(given|modelled)/(?P<steps>\d+)/" + _SCORES,
    r"checked/(?P<steps>\d+)/[a-z_]+/-?[\d.e+-]+/\d+/\d+/(" + _SCORES + r"|passes)",
    r"round_trip/latent/(own|encoder)",
    r"round_trip/text/" + _SCORES,
    r"t2l/(cosine|stranger_cosine|retrieval_at_\d+)",
    r"generated/(agreement/(own|encoder)|memorised_(whole|inside)|repeated_\d+|self_bleu)",
)
"""Of everything that an evaluation as a plan may ask for it measures."""
_EXAMPLES = (
    "text_bound/right",
    "text_gain/shuffled",
    "decode/given/{steps}/token_accuracy",
    "decode/given/{steps}/exact_match",
    "latent_bound/right",
    "t2l/cosine",
    "t2l/retrieval_at_1",
    "round_trip/text/token_accuracy",
    "generated/agreement/own",
)
"""The default columns, where some arm has them."""


def default_names(measured: Iterable[str], steps: Sequence[int]) -> list[str]:
    """What text and latent sides are judged by, and the ways to decode that were asked for."""
    known = list(dict.fromkeys(measured))
    main = [name.format(steps=max(steps)) for name in _EXAMPLES]
    ways = [name for name in known if re.fullmatch(r"checked/.*/token_accuracy", name)]
    return [name for name in [*main, *ways] if name in known]


def is_known(name: str, steps: Sequence[int]) -> bool:
    """Whether an evaluation at these numbers of steps can have a quantity of this name."""
    for pattern in _NAMES:
        found = re.fullmatch(pattern, name)
        if found:
            return "steps" not in found.groupdict() or int(found["steps"]) in steps
    return False


def check_names(names: Any, steps: Sequence[int]) -> None:
    """Refuse columns that no evaluation has."""
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError("quantities: a list of names is needed, such as [text_bound/right, t2l/cosine]")
    examples = [name.format(steps=max(steps)) for name in _EXAMPLES]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"quantities: {name} is there twice; leave one out")
        if not is_known(name, steps):
            near = difflib.get_close_matches(name, examples, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"names are such as {', '.join(examples[:4])}"
            raise UserError(f"quantities: {name}: nothing of this name is measured; {hint}")
