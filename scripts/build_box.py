"""Builds packages/mmldlm-wordnet, the package that carries the model `builtin:wordnet`. `make box` does all of it:

    python scripts/build_box.py --text wordnet.train.jsonl.gz --validation wordnet.valid.jsonl.gz

prepares the sentences, trains recipe wordnet-box, exports it as 8 bit, evaluates that export and writes the package:
weights, tokenizer, card with the measured figures, licences. What is there is not done again. For a model that was
trained on another machine (`mmldlm export RUN --precision int8`, `mmldlm eval EXPORT --data STORE --out REPORT` there):

    python scripts/build_box.py --model EXPORT --report REPORT --trained "130 s on one NVIDIA H200"
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mmldlm
from mmldlm.api.evaluate import FIGURES
from mmldlm.config.recipe import load_recipe
from mmldlm.errors import UserError
from mmldlm.evaluation.report import load_evaluated
from mmldlm.metrics import read_log

ROOT = Path(__file__).resolve().parents[1]
RECIPE, MOST_BYTES = "wordnet-box", 25_000_000
DATA = "glosses and example sentences of WordNet 3.0, with embeddings of all-MiniLM-L6-v2"
SENTENCE, SMALL, REPORT = "a coil of rope", Path("build/box/export"), Path("build/box/report")
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "mmldlm-wordnet"
version = "{version}"
description = "A trained MM-LDLM model of dictionary sentences: mmldlm.load('builtin:wordnet')"
readme = "README.md"
license = "Apache-2.0 AND LicenseRef-WordNet-3.0"
license-files = ["LICENSE", "LICENSE.wordnet"]
requires-python = ">=3.11,<3.14"
dependencies = ["mmldlm"]

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
mmldlm_wordnet = ["figures.json", "export/**"]
"""
MODULE = '"""A trained model as package data: `mmldlm.load("builtin:wordnet")`."""\n'
LICENCES = """
## Licence

The weights are under Apache-2.0 (`LICENSE`). They were trained on text of WordNet 3.0, whose licence and copyright
notice are in `LICENSE.wordnet`. The tokenizer's vocabulary is that of all-MiniLM-L6-v2 (Apache-2.0), whose embeddings
are the latents.

## Training it again

    python scripts/build_box.py --text wordnet.train.jsonl.gz --validation wordnet.valid.jsonl.gz
"""
WORDNET = """\
WordNet Release 3.0

This software and database is being provided to you, the LICENSEE, by
Princeton University under the following license.  By obtaining, using
and/or copying this software and database, you agree that you have
read, understood, and will comply with these terms and conditions.:

Permission to use, copy, modify and distribute this software and
database and its documentation for any purpose and without fee or
royalty is hereby granted, provided that you agree to comply with
the following copyright notice and statements, including the disclaimer,
and that the same appear on ALL copies of the software, database and
documentation, including modifications that you make for internal
use or for distribution.

WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved.

THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS" AND PRINCETON
UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS OR
IMPLIED.  BY WAY OF EXAMPLE, BUT NOT LIMITATION, PRINCETON
UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES OF MERCHANT-
ABILITY OR FITNESS FOR ANY PARTICULAR PURPOSE OR THAT THE USE
OF THE LICENSED SOFTWARE, DATABASE OR DOCUMENTATION WILL NOT
INFRINGE ANY THIRD PARTY PATENTS, COPYRIGHTS, TRADEMARKS OR
OTHER RIGHTS.

The name of Princeton University or Princeton may not be used in
advertising or publicity pertaining to distribution of the software
and/or database.  Title to copyright in this software, database and
any associated documentation shall at all times remain with
Princeton University and LICENSEE agrees to preserve same.
"""


def main() -> None:
    """Train where no model is named, evaluate where no report is, and pack."""
    parser = argparse.ArgumentParser(description="Build the package of the model builtin:wordnet.")
    parser.add_argument("--text", type=Path, help="sentences to train on, one JSON object with `text` a line")
    parser.add_argument("--validation", type=Path, help="held-out sentences")
    parser.add_argument("--model", type=Path, help="a run or an export that is trained already")
    parser.add_argument("--report", type=Path, help="folder of its evaluation; default: evaluate it now")
    parser.add_argument(
        "--trained", help="for how long and on what, where --model comes from another machine"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "packages" / "mmldlm-wordnet")
    parser.add_argument("settings", nargs="*", help="section.key=value for the training")
    options = parser.parse_args()
    try:
        build(options)
    except UserError as error:
        parser.error(str(error))


def build(options: argparse.Namespace) -> None:
    """Everything that is not done yet."""
    model = options.model or train(options)
    trained = options.trained or describe_training(model)
    mmldlm.load(model).save(SMALL, precision="int8")
    pack(SMALL, options.report or evaluate(options.settings), trained, options.out)
    packed = mmldlm.load(options.out / "src" / "mmldlm_wordnet" / "export")
    print(f"{options.out}: {SENTENCE!r} becomes {str(packed.decode(packed.encode([SENTENCE]))[0])!r}")


def train(options: argparse.Namespace) -> Path:
    """The run of the recipe; its pair store is prepared first where there is none."""
    store = Path(load_recipe(RECIPE, options.settings).data.store)
    if not store.exists():
        if options.text is None or options.validation is None:
            raise UserError(
                f"{store}: there is no such pair store; name the sentences with --text and --validation"
            )
        mmldlm.prepare(options.text, store, validation_source=options.validation, max_tokens=64, derive=4)
    return Path(mmldlm.train(RECIPE, overrides=options.settings).path)


def describe_training(model: Path) -> str:
    """How long the run took and where, from its log."""
    rows = list(read_log(model / "training_log.jsonl"))
    if not rows:
        raise UserError(
            f"{model}: has no training log; say with --trained for how long and on what it was trained"
        )
    seconds, device = rows[-1]["time"] - rows[0]["time"], mmldlm.load(model).device
    return f"{seconds:,.0f} s on {device_name(str(device))}"


def device_name(device: str) -> str:
    """The GPU by its name."""
    import torch

    return f"one {torch.cuda.get_device_name()}" if device.startswith("cuda") else f"a {device.upper()}"


def evaluate(settings: list[str]) -> Path:
    """Measure the 8-bit export on all held-out sentences; the folder of the report."""
    sizes = ["num_documents=0", "num_decoded=0", "num_generated=1000", "step_counts=[1,4,32]"]
    chosen = [word for word in settings if word.startswith(("evaluation.", "sampling."))]
    mmldlm.evaluate(SMALL, out=REPORT, overrides=[*(f"evaluation.{word}" for word in sizes), *chosen])
    return REPORT


def pack(small: Path, report: Path, trained: str, out: Path) -> None:
    """Write the package; nothing of an older one stays."""
    result = load_evaluated(report).result
    if result.inversion is None or result.retrieval is None:
        raise UserError(f"{report}: an evaluation of decoding and encoding is needed; evaluate again")
    shutil.rmtree(out, ignore_errors=True)
    package = out / "src" / "mmldlm_wordnet"
    mmldlm.load(small).save_pretrained(
        package / "export", precision="int8", report=report, name="builtin:wordnet", license="other"
    )
    for name in (
        "README.md",
        "figures",
    ):  # the card and its pictures are for readers, not for every installation
        if (package / "export" / name).exists():
            shutil.move(package / "export" / name, out / name)
    figures = {
        "recipe": RECIPE, "trained": trained, "data": DATA, "step": result.model.step,
        "num_held_out": result.data.num_documents, "num_sampling_steps": result.inversion.best.num_sampling_steps,
        "tokens_right": result.inversion.tokens_right.value, "retrieval_at_1": result.retrieval.retrieval_at_1.value,
        "encoding_cosine": result.retrieval.cosine.value,
    }  # fmt: skip
    (package / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
    (package / "__init__.py").write_text(MODULE)
    (out / "pyproject.toml").write_text(PROJECT.format(version=mmldlm.__version__))
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")
    (out / "LICENSE.wordnet").write_text(WORDNET)
    card = (out / "README.md").read_text("utf-8")
    card = card.replace("\n```bash", "\n<!-- checked: a long evaluation -->\n```bash")
    (out / "README.md").write_text(card + LICENCES, "utf-8")
    size = sum(path.stat().st_size for path in package.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise UserError(
            f"{package}: {size / 1e6:.1f} MB; a package of at most {MOST_BYTES / 1e6:.0f} MB is wanted"
        )
    print(f"{package}: {size / 1e6:.1f} MB, {figures['tokens_right']:.1%} of held-out tokens right")


if __name__ == "__main__":
    main()
