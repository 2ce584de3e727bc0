"""The migration as a document and as recipes; and `doctor config`, one settings file looked at on its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mmldlm.config.old_settings import is_old
from mmldlm.errors import SettingsError, UserError
from mmldlm.migrate.repository import Migration
from mmldlm.migrate.translation import Translation, check_recipe, read_composed, recipe_text, translate

CHANGES: tuple[tuple[str, str], ...] = (
    (
        "Gradient accumulation",
        "the documents of a step are fixed; micro-batches are cut from them and give the same loss.",
    ),
    (
        "l2t",
        "was trained fully masked only, but sampled partly unmasked; now all masking levels are trained.",
    ),
    ("t2l", "was trained at pure noise only, so the text did not matter; now all noise levels are trained."),
    (
        "Latent loss",
        "the noise target was normalised, so no sampler formula held; the target is what `prediction_type` says.",
    ),
    (
        "Latents",
        "were used as they came; now they are standardised with the training split's own statistics.",
    ),
    ("Padding", "was a target; now there is none."),
    ("Weights", "were bfloat16 and lost small updates; now float32, with bf16 products."),
    ("Resume", "could not work; now it continues the same run bit for bit in its random choices."),
    (
        "Data",
        "only the first 10,000 files were read; now all. A file that cannot be read stops the run instead of "
        "becoming zeros.",
    ),
    ("A bad batch", "was skipped by one rank alone and hung the others; now all ranks skip together."),
)
"""What behaves differently, and how."""


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
        f"# Migration of {migration.root.resolve().name}",
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
            "`mmldlm data import FOLDER --out store --tokenizer NAME --validation 0.01`."
        ]
    lines += ["", "## Command lines", ""]
    for command in migration.commands:
        lines += [
            f"- `{command.script}:{command.line}`",
            f"  - old: `{command.old}`",
            f"  - new: `{command.new}`",
        ]
        lines += [f"  - its pair store: `{command.make_store}`"] if command.make_store else []
        lines += [f"  - never had an effect: {entry}" for entry in command.ignored]
        lines += [f"  - not carried over: {entry}" for entry in command.dropped]
    lines += ["", "## Environment", ""]
    lines += [f"- `{f.path}:{f.where}` {f.code}: {f.message}" for f in migration.environment] or [
        "- nothing to say"
    ]
    lines += ["", "## Settings", "", *(f"- not translated: {line}" for line in migration.rejected), ""]
    for translation in migration.translations:
        lines += [
            f"### {translation.source}",
            "",
            f"- pair store: `{translation.make_store}`",
            "",
            *(line if line.startswith("  ") else f"- {line}" for line in translation_lines(translation)),
            "",
        ]
    return "\n".join(lines)


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
    values = read_composed(path)
    if is_old(values):
        translation = translate(values, path.name)
        problems = [*translation.ignored, *translation.contradictions]
        return SettingsReport("old", problems, translation_lines(translation), recipe_text(translation))
    from mmldlm.config.recipe import make_config

    try:
        make_config(values)
    except UserError as error:
        problems = error.problems if isinstance(error, SettingsError) else [str(error)]
        return SettingsReport("ours", [problem.removeprefix("the recipe: ") for problem in problems])
    return SettingsReport("ours")
