"""The report of an evaluation: one HTML file that needs nothing else; its numbers and plots lie beside it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from mmldlm.durable import flush_folder, naming, volatile, write_file
from mmldlm.evaluation import report_sections as sections
from mmldlm.evaluation.figure import Picture
from mmldlm.evaluation.plots import NAMES, draw_pictures
from mmldlm.evaluation.tables import make_tables, to_markdown
from mmldlm.json_lines import encode
from mmldlm.metrics import read_log

REPORT, MARKDOWN, RESULT, DOCUMENTS = "report.html", "report.md", "result.json", "documents.json"


def write_report(folder: Path, result: dict[str, Any], *, training_log: Path | None) -> Path:
    """Write report.html, report.md, result.json, documents.json (values of single documents) and the plots.

    Plots of an older report that this one lacks are removed.
    """
    log = list(read_log(training_log)) if training_log is not None else []
    plain, numbers = number_files(result)
    pictures = draw_pictures(plain, log)
    files = {f"{picture.name}.png": picture.png for picture in pictures} | numbers
    files[REPORT] = page(plain, pictures).encode("utf-8", "replace")
    publish(folder, files, stale=[f"{name}.png" for name in NAMES])
    return folder / REPORT


def number_files(result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A result as strict JSON keeps it, and its files without page and pictures: what comparisons read."""
    plain = json.loads(encode(result))
    documents = json_bytes(plain.pop("documents", {}), indent=None)
    plain["documents_sha256"] = hashlib.sha256(documents).hexdigest()
    text = markdown(plain).encode("utf-8", "replace")
    return plain, {DOCUMENTS: documents, RESULT: json_bytes(plain), MARKDOWN: text}


def publish(folder: Path, files: dict[str, bytes], stale: list[str] | None = None) -> None:
    """Put files into a folder all together: written aside first, so that a full disk leaves what was there.

    A new folder appears whole. In one that exists already each file is renamed into its place, in the given order, and
    those of `stale` that are not among them go; files of others are left alone.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    exists = folder.is_dir()
    staged = volatile(folder if exists else folder.parent, "staging", folder.name)
    try:
        with naming(folder):
            staged.mkdir()
            for name, content in files.items():
                write_file(staged / name, [content])
            flush_folder(staged)
        if not exists:
            os.rename(staged, folder)
        else:
            for name in files:
                os.replace(staged / name, folder / name)
            staged.rmdir()
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    for name in set(stale or []) - files.keys():
        (folder / name).unlink(missing_ok=True)
    flush_folder(folder if exists else folder.parent)


def page(result: dict[str, Any], pictures: list[Picture]) -> str:
    """The whole HTML page."""
    body = [
        sections.headline(result),
        sections.notes(result["notes"]),
        sections.plots(pictures),
        sections.tables(make_tables(result)),
        sections.examples(result["examples"]),
        sections.generated(result["generation"]),
        sections.settings(result),
    ]
    return sections.whole_page(f"Evaluation of {result['model']['name']}", body)


def markdown(result: dict[str, Any]) -> str:
    """The tables for a README, an issue or a paper's appendix."""
    model, data = result["model"], result["data"]
    step = "" if model["step"] is None else f" after {model['step']:,} steps"
    parts = [
        f"# Evaluation of {model['name']}\n",
        f"{model['num_parameters'] / 1e6:.1f} M parameters{step}; {data['num_documents']:,} of "
        f"{data['num_held_out']:,} documents of the split {data['split']}. Intervals: 95 %, "
        f"{result['settings']['num_resamples']:,} bootstrap resamples of documents.\n",
        "".join(f"- {note}\n" for note in result["notes"]),
        *(to_markdown(table) for table in make_tables(result)),
    ]
    if command := result.get("command"):
        parts.append(f"```bash\n{command}\n```\n")
    return "\n".join(part for part in parts if part)


def json_bytes(value: Any, indent: int | None = 2) -> bytes:
    """Strict JSON for people (indented) or machines."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "replace")
