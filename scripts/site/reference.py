"""Reference pages that follow from the code: commands, settings, Python names, examples, the doctor's rules."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import click
import typer

import mmldlm


def commands_page() -> str:
    """Every command with its arguments and options, read from the parser itself."""
    from mmldlm.cli.main import app

    root = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "What `mmldlm COMMAND --help` prints, on one page. Generated from the parser.",
        "",
    ]
    for path, command in _walk(root, ()):
        lines += _command(path, command)
    return "\n".join(lines) + "\n"


def _walk(command: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    context = click.Context(command, info_name="mmldlm")
    rows = []
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is None or child.hidden:
            continue
        inner = hasattr(child, "list_commands")
        rows += _walk(child, (*path, name)) if inner else [((*path, name), child)]
    return rows


def _command(path: tuple[str, ...], command: Any) -> list[str]:
    name = "mmldlm " + " ".join(path)
    context = click.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## {name}", "", inspect.cleandoc(command.help or "").replace("\b\n", ""), ""]
    lines += [f"    {name} {usage}", "", "| option | meaning |", "|---|---|"]
    for param in command.get_params(context):
        lines.append(f"| {_option_words(param)} | {_cell(_option_help(param, context))} |")
    return [*lines, ""]


def _option_words(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name}`"
    return ", ".join(f"`{word}`" for word in (*param.opts, *param.secondary_opts))


def _option_help(param: Any, context: click.Context) -> str:
    record = param.get_help_record(context)
    return (record[1] if record else getattr(param, "help", "")) or ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def settings_page() -> str:
    """Every setting with type, default, allowed values and meaning, read from config/settings.py."""
    from mmldlm.config import settings

    texts = _field_texts(Path(inspect.getfile(settings)))
    lines = [
        "# Settings",
        "",
        "Every setting of a recipe, and of `section.key=value` after a command. `null` means chosen automatically. "
        "Generated from `config/settings.py`.",
        "",
    ]
    for section in dataclasses.fields(settings.Config):
        kind = getattr(settings, str(section.type).split(".")[-1].strip("'\""), None)
        if dataclasses.is_dataclass(kind):
            lines += _section(f"## `{section.name}`", kind, f"{section.name}.", texts)
    for name in ("BatchStage", "ModeStage"):
        if hasattr(settings, name):
            lines += _section(f"## A stage: `{name}`", getattr(settings, name), "", texts)
    return "\n".join(lines) + "\n"


def _section(heading: str, kind: Any, prefix: str, texts: dict[tuple[str, str], str]) -> list[str]:
    lines = [
        heading,
        "",
        inspect.cleandoc(kind.__doc__ or ""),
        "",
        "| setting and default | meaning |",
        "|---|---|",
    ]
    for item in dataclasses.fields(kind):
        meaning = " ".join(
            part for part in (texts.get((kind.__name__, item.name), ""), _allowed(item)) if part
        )
        lines.append(f"| `{prefix}{item.name}`<br>`{_default(item)}` | {_cell(meaning)} |")
    return [*lines, ""]


def _default(item: dataclasses.Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
    if value is None:
        return "null"
    if dataclasses.is_dataclass(value):
        pairs = dataclasses.asdict(value).items()  # type: ignore[call-overload]
        return "{" + ", ".join(f"{key}: {number:g}" for key, number in pairs) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def _allowed(item: dataclasses.Field[Any]) -> str:
    data = item.metadata
    if "allowed" in data:
        return "One of " + ", ".join(f"`{word}`" for word in data["allowed"]) + "."
    if "low" in data:
        low = f"{'above' if data['above'] else 'from'} {_number(data['low'])}"
        bounded = data["high"] != float("inf")
        high = f" {'below' if data['below'] else 'to'} {_number(data['high'])}" if bounded else ""
        return f"A number {low}{high}."
    return ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _field_texts(path: Path) -> dict[tuple[str, str], str]:
    """(class, field) -> the string under the field."""
    texts: dict[tuple[str, str], str] = {}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                texts[node.name, field.target.id] = inspect.cleandoc(str(after.value.value))
    return texts


FIRST = (
    "load",
    "Model",
    "prepare",
    "PairStore",
    "train",
    "Run",
    "list_runs",
    "evaluate",
    "compare",
    "UserError",
)


def api_page() -> str:
    """Public names, those that people meet first at the top; mkdocstrings fills them in."""
    modules = mmldlm._PUBLIC
    rest = [name for name in modules if name not in FIRST]
    lines = ["# Python", "", "Everything that `import mmldlm` offers. Examples are run by the tests.", ""]
    for name in (*FIRST, *rest):
        lines += [f"::: {modules[name]}.{name}", ""]
    return "\n".join(lines)


def examples_page(folder: Path) -> str:
    """The scripts of examples/, whole."""
    lines = ["# Examples", "", "Scripts of `examples/`; the tests run them.", ""]
    for path in sorted(folder.iterdir()):
        anchor = "".join(letter for letter in path.name.lower() if letter.isalnum() or letter == "_")
        lines += [f"## {path.name} {{ #{anchor} }}", ""]
        if path.suffix == ".py":
            lines += ["```python", path.read_text().rstrip(), "```", ""]
        else:
            lines += [f"A notebook: open `examples/{path.name}` in Jupyter.", ""]
    return "\n".join(lines)


def rules_page() -> str:
    """All rules of traindoctor on one page."""
    from traindoctor.pages import all_pages

    lines = ["# Rules", "", "What `traindoctor rule CODE` prints, on one page. Generated from the rules.", ""]
    for name, text in sorted(all_pages().items()):
        code = Path(name).stem
        if code != "index":
            head, _, rest = text.rstrip().partition("\n")
            lines += [f"#{head} {{ #{code.lower()} }}", rest, ""]
    return "\n".join(lines)
