"""A whole checkout of the research code: what is in it and what becomes of each part, as a document and as recipes.

Nothing in it is changed. `doctor config` looks at one settings file, of ours or of the research code, on its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from traindoctor.discovery import Found, discover
from traindoctor.shell_file import Command, ShellError, ShellFile
from traindoctor.source import UnreadableError, read_source
from traindoctor.types import Finding, Kind

from mmldlm.errors import UserError
from mmldlm.migrate.old_settings import CHANGES, DIRECT, DROPPED, IGNORED, flatten
from mmldlm.migrate.translation import Translation, check_recipe, is_old, read_yaml, recipe_text, translate


@dataclass
class OldCommand:
    """One command line that started a training, and ours."""

    script: str
    line: int
    old: str
    new: str
    ignored: list[str] = field(default_factory=list)
    """Words that never had an effect."""
    dropped: list[str] = field(default_factory=list)
    """Words without a counterpart."""


@dataclass
class Migration:
    """Everything found in a checkout."""

    root: Path
    translations: list[Translation] = field(default_factory=list)
    commands: list[OldCommand] = field(default_factory=list)
    data: list[tuple[str, str]] = field(default_factory=list)
    """Folder with data -> the command that imports it."""
    environment: list[Finding] = field(default_factory=list)


def examine_repository(root: Path) -> Migration:
    """Read a checkout."""
    from traindoctor.engine import audit
    from traindoctor.options import load_options

    if not root.is_dir():
        raise UserError(f"{root}: no such folder; give the checkout of the old code")
    _, files = discover(root)
    result = Migration(root)
    result.translations = list(_translations(root, files))
    if not result.translations:
        raise UserError(
            f"{root}: no settings of the MM-LDLM research code found (YAML with model and training); wrong folder?"
        )
    result.commands = _commands(root, files, _values_by_name(root, result.translations))
    result.data = _data(root)
    result.environment = audit(root, load_options(root, select=["NCC"], external=False)).findings
    return result


def _values_by_name(root: Path, translations: list[Translation]) -> dict[str, dict[str, Any]]:
    return {
        Path(translation.source).stem: read_yaml(root / translation.source) for translation in translations
    }


def _translations(root: Path, files: list[Found]) -> list[Translation]:
    translations = []
    for file in files:
        if file.kind is not Kind.YAML:
            continue
        try:
            values = read_yaml(file.absolute)
        except UserError:
            continue
        if is_old(values) and "training" in values and isinstance(values.get("model"), dict):
            translations.append(translate(values, file.relative))
    return translations


def _commands(root: Path, files: list[Found], configs: dict[str, dict[str, Any]]) -> list[OldCommand]:
    commands: list[OldCommand] = []
    for file in files:
        if file.kind is not Kind.SHELL:
            continue
        try:
            source = read_source(file.relative, Kind.SHELL, file.absolute.read_bytes())
            script = ShellFile(source)
        except (ShellError, UnreadableError, OSError):
            continue
        for command in script.commands:
            if command.is_training() and any(re.search(r"train\w*\.py$", word) for word in command.arguments):
                line = source.place(command.start)[0]
                commands.append(_command(file.relative, line, command, configs))
    return commands


def _command(script: str, line: int, command: Command, configs: dict[str, dict[str, Any]]) -> OldCommand:
    arguments = command.arguments
    config = _config_name(arguments)
    result = OldCommand(script, line, " ".join([command.name, *arguments[:6], "..."]), "")
    words, literal = [], {}
    for word in arguments:
        match = re.fullmatch(r"([a-z_]+(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if not match:
            continue
        key, value = match[1], match[2]
        if key in IGNORED:
            result.ignored.append(f"{key}: {IGNORED[key]}")
        elif key in DROPPED:
            result.dropped.append(f"{key}: {DROPPED[key]}")
        elif key in DIRECT:
            words.append(f"{DIRECT[key]}={value}")
        elif "$" not in value:
            literal[key] = yaml.safe_load(value) if value else None
    words += _combined(configs.get(config, {}), literal)
    recipe = (
        f"recipes/{config}.yaml"
        if config in configs or "$" in config
        else f"recipes/{config}.yaml (not found)"
    )
    result.new = " ".join(["mmldlm train --recipe", recipe, *words])
    return result


def _config_name(arguments: list[str]) -> str:
    for index, word in enumerate(arguments):
        if word == "--config-name" and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith("--config-name="):
            return word.split("=", 1)[1]
    return "CONFIG"


def _combined(values: dict[str, Any], changed: dict[str, Any]) -> list[str]:
    """Settings that several old ones make together (batch, mode): what changes when these are overridden."""
    before = flatten(translate(values, "").recipe) if values else {}
    merged: dict[str, Any] = {
        key: dict(section) if isinstance(section, dict) else section for key, section in values.items()
    }
    for key, value in changed.items():
        section, name = key.split(".", 1)
        if isinstance(merged.setdefault(section, {}), dict):
            merged[section][name] = value
    if "loss_type" in {key.rsplit(".", 1)[-1] for key in changed} and isinstance(merged.get("loss"), dict):
        merged["loss"]["loss_type"] = changed.get("loss.loss_type", changed.get("training.loss_type"))
    after = flatten(translate(merged, "").recipe)
    gone = [key for key in before if key.startswith("corruption.mode_weights.") and key not in after]
    return [f"{key}=0" for key in gone] + [
        shlex.quote(f"{key}={value}")
        for key, value in after.items()
        if key not in ("name",) and before.get(key) != value and values
    ]


def _data(root: Path) -> list[tuple[str, str]]:
    folders: list[tuple[str, str]] = []
    for tokens in sorted(root.rglob("tokens")):
        base = tokens.parent
        if tokens.is_dir() and (base / "latents").is_dir():
            relative = base.relative_to(root).as_posix()
            folders.append((relative, f"mmldlm data import {base} --out store --tokenizer bert-base-uncased"))
    for file in sorted(root.rglob("*_data.jsonl")):
        relative = file.relative_to(root).as_posix()
        folders.append((relative, f"mmldlm prepare --input {file} --out store"))
    return folders


def translation_lines(translation: Translation) -> list[str]:
    """What a person should know about one translated file."""
    lines: list[str] = []
    for title, entries in (
        ("Ignored by the old code", translation.ignored),
        ("Without a counterpart", translation.dropped),
        ("Contradictions", translation.contradictions),
        ("Unknown to both", translation.unknown),
        ("Notes", translation.notes),
        ("Our loader says", check_recipe(translation.recipe)),
    ):
        if entries:
            lines += [f"{title}:", *(f"  - {entry}" for entry in entries)]
    return lines


def report_text(migration: Migration) -> str:
    """The whole report as Markdown."""
    lines = [
        f"# Migration of {migration.root.name}",
        "",
        f"{len(migration.translations)} settings files, {len(migration.commands)} command lines, "
        f"{len(migration.data)} data folders, {len(migration.environment)} remarks on environment variables. "
        "Nothing in the old checkout was changed.",
        "",
        "## What behaves differently",
        "",
        *(f"- **{what}**: {how}" for what, how in CHANGES),
        "",
        "## Data",
        "",
    ]
    if migration.data:
        lines += [f"- `{folder}`: `{command}`" for folder, command in migration.data]
    else:
        lines += [
            "- No `tokens/` and `latents/` folders and no `*_data.jsonl` lie in this checkout. With the data "
            "elsewhere: "
            "`mmldlm data import FOLDER --out store --tokenizer NAME`."
        ]
    lines += ["", "## Command lines", ""]
    for command in migration.commands:
        lines += [
            f"- `{command.script}:{command.line}`",
            f"  - old: `{command.old}`",
            f"  - new: `{command.new}`",
        ]
        lines += [f"  - never had an effect: {entry}" for entry in command.ignored]
        lines += [f"  - has no counterpart: {entry}" for entry in command.dropped]
    lines += ["", "## Environment", ""]
    lines += [f"- `{f.path}:{f.where}` {f.code}: {f.message}" for f in migration.environment] or [
        "- nothing to say"
    ]
    lines += ["", "## Settings", ""]
    for translation in migration.translations:
        lines += [f"### {translation.source}", "", *_as_list(translation_lines(translation)), ""]
    return "\n".join(lines)


def _as_list(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" if not line.startswith("  ") else line for line in lines]


def write_migration(migration: Migration, out: Path) -> list[Path]:
    """Write the report and one recipe per settings file; returns what was written."""
    recipes = out / "recipes"
    recipes.mkdir(parents=True, exist_ok=True)
    written = [out / "migration.md"]
    written[0].write_text(report_text(migration), "utf-8")
    taken: set[str] = set()
    for translation in migration.translations:
        stem = Path(translation.source).stem
        if stem in taken:
            stem = translation.source.removesuffix(".yaml").replace("/", "-")
        taken.add(stem)
        target = recipes / f"{stem}.yaml"
        target.write_text(recipe_text(translation), "utf-8")
        written.append(target)
    return written


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
    from mmldlm.config.recipe import make_config

    try:
        make_config(values)
    except UserError as error:
        return SettingsReport("ours", str(error).removeprefix("the recipe: ").split("; "))
    return SettingsReport("ours")
