"""The report of an evaluation: one HTML file that needs nothing else; its numbers and plots lie beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmldlm.durable import replace_file
from mmldlm.evaluation import report_sections as sections
from mmldlm.evaluation.figure import Picture
from mmldlm.evaluation.plots import NAMES, draw_pictures
from mmldlm.evaluation.report_style import STYLE
from mmldlm.json_lines import encode
from mmldlm.metrics import read_log

REPORT, RESULT, DOCUMENTS = "report.html", "result.json", "documents.json"


def write_report(folder: Path, result: dict[str, Any], *, training_log: Path | None) -> Path:
    """Write report.html, result.json, documents.json (values of single documents) and the plots.

    Each file is replaced as a whole; plots of an older report that this one lacks are removed.
    """
    log = list(read_log(training_log)) if training_log is not None else []
    plain = json.loads(encode(result))
    documents = plain.pop("documents", None)
    pictures = draw_pictures(plain, log)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {picture.name: picture.png for picture in pictures}
    for name in NAMES:
        if name in drawn:
            replace_file(folder / f"{name}.png", drawn[name])
        else:
            (folder / f"{name}.png").unlink(missing_ok=True)
    _write_json(folder / RESULT, plain)
    if documents is not None:
        _write_json(folder / DOCUMENTS, documents, indent=None)
    replace_file(folder / REPORT, page(plain, pictures).encode("utf-8"))
    return folder / REPORT


def page(result: dict[str, Any], pictures: list[Picture]) -> str:
    """The whole HTML page."""
    body = [
        sections.headline(result),
        sections.notes(result["notes"]),
        sections.plots(pictures),
        sections.bound_table(result["text_bound"]),
        sections.inversion_table(result["inversion"]),
        sections.retrieval_table(result["retrieval"]),
        sections.examples(result["examples"]),
        sections.settings(result),
    ]
    title = f"Evaluation of {sections.escape(result['model']['name'])}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def _write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(path, text.encode("utf-8", "replace"))
