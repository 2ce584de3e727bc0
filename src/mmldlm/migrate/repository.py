"""A whole checkout of the research code: what is in it and what becomes of each part. Nothing in it is changed."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from traindoctor.discovery import Found, discover
from traindoctor.shell_file import Command, ShellError, ShellFile
from traindoctor.source import UnreadableError, read_source
from traindoctor.types import Finding, Kind

from mmldlm.config.old_settings import (
    DROPPED,
    IGNORED,
    KNOWN,
    READ_BY_BASELINES,
    TRANSLATED,
    flatten,
    is_old,
)
from mmldlm.errors import UserError
from mmldlm.migrate.translation import Translation, is_baseline, read_composed, translate

_HOW = {"training", "loss", "optimizer"}
"""A file of settings that trains has one of these sections."""
_REST = "--out store --tokenizer NAME --validation 0.01"


@dataclass
class OldCommand:
    """One command line that started a training, and ours."""

    script: str
    line: int
    old: str
    new: str = ""
    ignored: list[str] = field(default_factory=list)
    """Words that never had an effect."""
    dropped: list[str] = field(default_factory=list)
    """Words without a counterpart, or with a value that only the script knows."""
    make_store: str = ""


@dataclass
class Migration:
    """Everything that a checkout, or a single settings file, contains."""

    root: Path
    translations: list[Translation] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    """Settings of other kinds of model, and why they are not translated."""
    commands: list[OldCommand] = field(default_factory=list)
    data: list[tuple[str, str]] = field(default_factory=list)
    """Folder with data -> the command that imports it."""
    environment: list[Finding] = field(default_factory=list)


def examine_repository(root: Path) -> Migration:
    """Read a checkout, or one settings file of it."""
    from traindoctor.engine import audit
    from traindoctor.options import load_options

    if root.is_file():
        values = read_composed(root)
        if not is_old(values):
            raise UserError(
                f"{root}: no settings of the research code (sections such as training and optimizer)"
            )
        return Migration(root.parent, [translate(values, root.name)])
    if not root.is_dir():
        raise UserError(
            f"{root}: no such folder; give the checkout of the old code, or one of its YAML files"
        )
    _, files = discover(root)
    result = Migration(root)
    configs = _translate_files(files, result)
    if not configs:
        raise UserError(
            f"{root}: no settings of the MM-LDLM research code found (YAML with the section model, and training, loss "
            "or optimizer); wrong folder?"
        )
    result.commands = _commands(files, configs)
    result.data = _data(root)
    result.environment = audit(root, load_options(root, select=["NCC"], external=False)).findings
    return result


def _translate_files(files: list[Found], result: Migration) -> dict[str, dict[str, Any]]:
    """The values of all old settings files by name; those that can be translated go into the result."""
    configs: dict[str, dict[str, Any]] = {}
    for file in files:
        if file.kind is not Kind.YAML:
            continue
        try:
            values = read_composed(file.absolute)
        except UserError:
            continue
        if not (is_old(values) and _HOW & values.keys() and isinstance(values.get("model"), dict)):
            continue
        configs[Path(file.relative).stem] = values
        try:
            result.translations.append(translate(values, file.relative))
        except UserError as error:
            result.rejected.append(str(error))
    return configs


def _commands(files: list[Found], configs: dict[str, dict[str, Any]]) -> list[OldCommand]:
    commands: list[OldCommand] = []
    for file in files:
        if file.kind is not Kind.SHELL:
            continue
        try:
            source = read_source(file.relative, Kind.SHELL, file.absolute.read_bytes())
            script = ShellFile(source)
        except (ShellError, UnreadableError, OSError):
            continue
        variables = _variables(script)
        for command in script.commands:
            if command.is_training() and any(re.search(r"train\w*\.py$", word) for word in command.arguments):
                line = source.place(command.start)[0]
                commands.append(_command(file.relative, line, command, configs, variables))
    return commands


def _variables(script: ShellFile) -> dict[str, str]:
    """The variables of a script; one that gets several values, on some condition, stands for itself."""
    values: dict[str, str] = {}
    for assignment, _ in script.assignments():
        name, value = assignment.name, assignment.value.plain
        values[name] = value if values.get(name, value) == value else f"${{{name}}}"
    return values


def _command(
    script: str, line: int, command: Command, configs: dict[str, dict[str, Any]], variables: Mapping[str, str]
) -> OldCommand:
    arguments = [expand(word, variables) for word in command.arguments]
    result = OldCommand(script, line, " ".join([command.name, *command.arguments[:6], "..."]))
    config, nodes, local = (_option(arguments, name) for name in ("config-name", "nnodes", "nproc-per-node"))
    changed = _changed(arguments, result, is_baseline(flatten(configs.get(config, {}))))
    known = config in configs
    num_nodes, num_local = (int(words) if words.isdecimal() else 1 for words in (nodes, local))
    result.dropped += [
        f"--{option}: its value is computed by the script ({words}); 1 counts in the batch: add ours by hand"
        for option, words in (("nnodes", nodes), ("nproc-per-node", local))
        if words and not words.isdecimal()
    ]
    try:
        words, result.make_store = _combined(configs.get(config, {}), changed, num_nodes * num_local, script)
    except UserError as error:
        result.new = f"none: {error}"
        return result
    launch = [f"--nnodes {num_nodes} --rdzv-endpoint HOST:29500"] if num_nodes > 1 else []
    launch += [f"--nproc-per-node {num_local}"] if num_local > 1 else []
    start = ["mmldlm launch", *launch, "-- train"] if launch else ["mmldlm train"]
    recipe = shlex.quote(f"recipes/{config}.yaml") + ("" if known else " (not found)")
    folder, name = changed.get("logging.save_dir"), changed.get("logging.run_name")
    run = [f"--run {shlex.quote(f'{folder}/{name}')}"] if folder and name else []
    result.new = " ".join([*start, "--recipe", recipe, *run, *words])
    return result


def expand(word: str, variables: Mapping[str, str], depth: int = 8) -> str:
    """A word of a script with its variables put in: `${NAME}` and `${NAME:-default}`, defaults for what is not set.

    `$(scale_value "${NAME}")` is that of one node. What the script computes otherwise stays as it is written.
    """
    word = re.sub(r'\$\(scale_value "?(\$\{\w+\})"?\)', r"\1", word)
    if depth == 0 or "$" not in word or "$(" in word:
        return word

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        text = variables.get(name)
        refers_to_itself = text is not None and re.match(rf"\$\{{{name}:?-", text)
        if text is None or refers_to_itself:
            inner = re.fullmatch(rf"\$\{{{name}:?-(.*)\}}", text or "", re.DOTALL)
            text = inner[1] if inner else (default if default is not None else match[0])
        return text

    expanded = re.sub(r"\$\{(\w+)(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)", value, word)
    return expanded if expanded == word else expand(expanded, variables, depth - 1)


def _changed(arguments: list[str], result: OldCommand, baseline: bool) -> dict[str, Any]:
    """Old settings that the command line changes."""
    changed: dict[str, Any] = {}
    for word in arguments:
        match = re.fullmatch(r"([a-z_]+(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if not match:
            continue
        key, text = match[1], match[2]
        if "$" in text:
            result.dropped.append(f"{key}: its value is computed by the script ({text}); add ours by hand")
            continue
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore[index,call-overload]
        changed[key] = value
        if baseline and key in READ_BY_BASELINES:
            result.dropped += [f"{key}: {READ_BY_BASELINES[key]}"] if READ_BY_BASELINES[key] else []
        elif key in IGNORED:
            result.ignored.append(f"{key}: {IGNORED[key]}")
        elif key in DROPPED and key != "logging.save_dir":
            result.dropped.append(f"{key}: {DROPPED[key]}")
        elif key not in KNOWN:
            result.dropped.append(f"{key}: unknown to both")
    return changed


def _option(arguments: list[str], name: str) -> str:
    """The value of `--name value` or `--name=value`, with - or _ in the name; empty where it is not there."""
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == f"--{name}":
            return value if equals else next(iter(arguments[index + 1 : index + 2]), "")
    return ""


def _combined(
    values: dict[str, Any], changed: dict[str, Any], ranks: int, script: str
) -> tuple[list[str], str]:
    """What a command line changes in the recipe, as words, and the command that makes its store."""
    before = flatten(translate(values, script).recipe)
    del before["data.store"]
    merged = copy.deepcopy(values)
    for key, value in changed.items():
        section, name = key.split(".", 1)
        if isinstance(merged.setdefault(section, {}), dict):
            merged[section][name] = value
    if "loss.loss_type" in changed or "training.loss_type" in changed:
        mode = changed.get("loss.loss_type", changed.get("training.loss_type"))
        merged.setdefault("loss", {})["loss_type"] = mode
    translation = translate(merged, script, ranks)
    after = flatten(translation.recipe)
    if not any(
        key.startswith("data.") and key in TRANSLATED for key in changed
    ):  # the store of the recipe serves
        del after["data.store"]
        translation.make_store = ""
    gone = [key for key in before if key.startswith("corruption.mode_weights.") and key not in after]
    words = [f"{key}=0" for key in gone] + [
        shlex.quote(f"{key}={value}") for key, value in after.items() if before.get(key) != value
    ]
    return words, translation.make_store


def _data(root: Path) -> list[tuple[str, str]]:
    folders: list[tuple[str, str]] = []
    for tokens in sorted(root.rglob("tokens")):
        base = tokens.parent
        if tokens.is_dir() and (base / "latents").is_dir():
            relative = base.relative_to(root).as_posix()
            folders.append((relative, f"{shlex.join(['mmldlm', 'data', 'import', str(base)])} {_REST}"))
    for file in sorted(root.rglob("*_data.jsonl")):
        relative = file.relative_to(root).as_posix()
        folders.append((relative, shlex.join(["mmldlm", "prepare", str(file), "--out", "store"])))
    return folders
