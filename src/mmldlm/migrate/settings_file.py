"""`doctor config`: one settings file of ours or of the research code, looked at on its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mmldlm.errors import UserError
from mmldlm.migrate.report import translation_lines
from mmldlm.migrate.translation import is_old, read_yaml, recipe_text, translate


@dataclass
class SettingsReport:
    """What is wrong with a settings file, and its translation where it is an old one."""

    kind: str
    """ours or old"""
    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    recipe: str | None = None


def examine_settings(path: Path) -> SettingsReport:
    """Read a settings file and say what is unread, contradictory or has changed its name."""
    values = read_yaml(path)
    if is_old(values):
        translation = translate(values, path.name)
        problems = [*translation.ignored, *translation.contradictions]
        return SettingsReport("old", problems, translation_lines(translation), recipe_text(translation))
    from mmldlm.config.recipe import config_from_dict

    try:
        config_from_dict(values)
    except UserError as error:
        return SettingsReport("ours", str(error).removeprefix("the saved settings: ").split("; "))
    return SettingsReport("ours")
