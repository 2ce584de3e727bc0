"""The report of an evaluation: one HTML file that needs nothing else; its numbers and pictures lie beside it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from mmldlm.durable import flush_folder, naming, volatile, write_file
from mmldlm.errors import UserError
from mmldlm.evaluation.bounds import TextBounds
from mmldlm.evaluation.plots import NAMES, draw_pictures
from mmldlm.evaluation.results import DecodedExample, Evaluation, Generation, Inversion, Retrieval
from mmldlm.evaluation.tables import make_tables
from mmldlm.json_lines import encode
from mmldlm.metrics import read_log
from mmldlm.reports import Card, Picture, number, percent, render_page, signed

REPORT, MARKDOWN, RESULT, DOCUMENTS = "report.html", "report.md", "result.json", "documents.json"


def write_report(folder: Path, result: Evaluation, *, training_log: Path | None = None) -> Path:
    """Write report.html, report.md, result.json, documents.json (values of single documents) and the pictures.

    Pictures of an older report that this one lacks are removed.
    """
    log = list(read_log(training_log)) if training_log is not None else []
    pictures = draw_pictures(result, log)
    files = {f"{picture.name}.png": picture.png for picture in pictures} | number_files(result)
    files[REPORT] = page(result, pictures)
    publish(folder, files, stale=[f"{name}.png" for name in NAMES])
    return folder / REPORT


def number_files(result: Evaluation) -> dict[str, bytes]:
    """The files of a result without page and pictures: what comparisons read."""
    documents = json_bytes(json.loads(encode(result.documents_json())), indent=None)
    numbers = result.to_json() | {"documents_sha256": hashlib.sha256(documents).hexdigest()}
    text = markdown(result).encode("utf-8", "replace")
    return {DOCUMENTS: documents, RESULT: json_bytes(json.loads(encode(numbers))), MARKDOWN: text}


def read_result(folder: Path) -> Evaluation:
    """The result in the folder of a report."""
    content, documents = _read_json(folder / DOCUMENTS)
    _, values = _read_json(folder / RESULT)
    try:
        result = Evaluation.from_json(values, documents)
    except UserError as error:
        raise UserError(f"{folder / RESULT}: {error}") from error
    if values.get("documents_sha256") != hashlib.sha256(content).hexdigest():
        raise UserError(f"{folder}: {DOCUMENTS} does not belong to {RESULT}; evaluate the run again")
    return result


def _read_json(path: Path) -> tuple[bytes, Any]:
    """The bytes of a file, and its value."""
    try:
        content = path.read_bytes()
        return content, json.loads(content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise UserError(f"{path}: cannot be read ({reason}); evaluate the run again") from error


def publish(folder: Path, files: dict[str, bytes], stale: list[str] | None = None) -> None:
    """Put files into a folder all together: written to a staging folder first, so that a full disk changes nothing.

    A new folder appears whole. In one that exists already each file is renamed into its place, in the given order, and
    those of `stale` that are not among them go; other files are left alone.
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


def json_bytes(value: Any, indent: int | None = 2) -> bytes:
    """Strict JSON for people (indented) or machines."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "replace")


def page(result: Evaluation, pictures: list[Picture]) -> bytes:
    """The whole HTML page."""
    return render_page(
        f"Evaluation of {result.model.name}",
        intro=[describe(result)],
        cards=cards(result),
        notes=result.notes,
        pictures=pictures,
        tables=make_tables(result),
        command=result.command,
        details={
            "Settings": result.settings,
            "Model": vars(result.model),
            "Data": vars(result.data),
            "Versions": result.versions,
            "Seconds": result.seconds,
        },
        template="evaluation.html",
        examples=result.examples,
        generated=result.generation.examples if result.generation else [],
        mark_differences=mark_differences,
        scores=_example_scores,
    )


def markdown(result: Evaluation) -> str:
    """The tables for a README, an issue or a paper's appendix."""
    intervals = f"Intervals: 95 %, {result.settings['num_resamples']:,} bootstrap resamples of documents."
    parts = [
        f"# Evaluation of {result.model.name}\n",
        f"{describe(result)} {intervals}\n",
        "".join(f"- {note}\n" for note in result.notes),
        *(table.to_markdown() for table in make_tables(result)),
    ]
    if result.command:
        parts.append(f"```bash\n{result.command}\n```\n")
    return "\n".join(part for part in parts if part)


def describe(result: Evaluation) -> str:
    """Model and data in one sentence."""
    model, data = result.model, result.data
    step = "" if model.step is None else f" after {model.step:,} steps"
    return (
        f"{model.num_parameters / 1e6:.1f} M parameters{step}; {data.num_documents:,} of {data.num_held_out:,} "
        f"documents of the split {data.split} ({data.num_tokens:,} tokens)."
    )


def cards(result: Evaluation) -> list[Card]:
    """The headline numbers."""
    return [
        *(_bound_cards(result.bounds.text) if result.bounds.text else []),
        *(_inversion_cards(result.inversion) if result.inversion else []),
        *(_retrieval_cards(result.retrieval) if result.retrieval else []),
        *(_generation_cards(result.generation) if result.generation else []),
    ]


def _bound_cards(bounds: TextBounds) -> list[Card]:
    gain = bounds.gain.shuffled
    return [
        Card(
            number(bounds.right.perplexity),
            "perplexity of held-out text",
            f"{bounds.right.nats_per_token.value:.3f} nats per token",
        ),
        Card(
            signed(gain.value),
            "nats per token saved by the right latent, against a shuffled one",
            f"95 % interval {signed(gain.low)} to {signed(gain.high)}",
        ),
    ]


def _inversion_cards(inversion: Inversion) -> list[Card]:
    best = inversion.best
    bleu = "" if best.bleu is None else f"BLEU {best.bleu.value:.1f}, "
    steps = f"{best.num_sampling_steps} steps, true length given"
    accuracy = Card(
        percent(best.token_accuracy.value), "of tokens right, decoded from the latent", f"{bleu}{steps}"
    )
    if best.reencoded_cosine is None or inversion.cosine_reference is None:
        return [accuracy]
    unrelated = f"unrelated texts {inversion.cosine_reference.strangers:.3f}"
    meaning = Card(f"{best.reencoded_cosine.value:.3f}", "cosine of the decoded text, re-encoded", unrelated)
    return [accuracy, meaning]


def _retrieval_cards(retrieval: Retrieval) -> list[Card]:
    return [
        Card(
            percent(retrieval.retrieval_at_1.value),
            "of texts find their own latent first",
            f"chance {percent(retrieval.chance_at_1, 2)} of {retrieval.num_candidates:,}",
        ),
        Card(
            f"{retrieval.cosine.value:.3f}",
            "cosine of text to latent, against the encoder",
            f"to unrelated ones {retrieval.stranger_cosine.value:.3f}",
        ),
    ]


def _generation_cards(generation: Generation) -> list[Card]:
    agreement = generation.agreement
    value, unrelated, by = agreement.own, agreement.own_strangers, "the model itself"
    if agreement.encoder is not None and agreement.encoder_strangers is not None:
        value, unrelated, by = agreement.encoder, agreement.encoder_strangers, "the encoder"
    what = f"cosine of generated latents and their texts, by {by}"
    return [Card(f"{value.value:.3f}", what, f"unrelated ones {unrelated:.3f}")]


def _example_scores(decoded: DecodedExample) -> str:
    cosine = decoded.reencoded_cosine
    return percent(decoded.token_accuracy, 0) + ("" if cosine is None else f", cosine {cosine:.2f}")


def mark_differences(true: str, decoded: str) -> list[tuple[str, bool]]:
    """The decoded text in pieces, each with whether the true text has it in that order; by words."""
    words = decoded.split()
    matcher = SequenceMatcher(
        None, [w.lower() for w in true.split()], [w.lower() for w in words], autojunk=False
    )
    pieces: list[tuple[str, bool]] = []
    for kind, _, _, start, stop in matcher.get_opcodes():
        if start < stop:
            pieces.append((" ".join(words[start:stop]), kind == "equal"))
    return pieces
