"""The text of most figures in docs/results.md: python docs/results/wordnet_corpus.py FOLDER [DICT]

Writes `wordnet.train.jsonl.gz` and `wordnet.valid.jsonl.gz` of the published figures into FOLDER: glosses and example
sentences of WordNet 3.0. Needs Debian 12 with apt and dpkg-deb, network, and 50 MB in FOLDER; nothing is installed.
The package `wordnet-base` is fetched into FOLDER/packages unless it is there already. With DICT, a folder that holds
data.noun, data.verb, data.adj and data.adv of WordNet 3.0 (/usr/share/wordnet if installed), nothing is fetched.

Licence of the text: WordNet 3.0 licence, Copyright 2006 by Princeton University, all rights reserved. It permits use,
copies and changes for any purpose if every copy carries its notice (packages/mmldlm-wordnet/LICENSE.wordnet).

Synsets are split by a hash; 4 % are in neither file. The last line gives lines and sha256 of both files, uncompressed.
The exit code is 1 if they are not the published files, 2 after an error.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from curve_corpus import fetch, members

PACKAGE, PARTS_OF_SPEECH = "wordnet-base", ("noun", "verb", "adj", "adv")
SYNSET = re.compile(r"^(\d{8}) \d\d \w \w\w (\S+) [^|\n]*\| (.*)$", re.M)
SHORTEST = 4  # characters of a gloss, words of an example
PUBLISHED = {
    "train": "a983bfb1b9ee299ea2fd41222382e1256cd41eb009ed48d543d6dd963975999e",
    "valid": "1b7d35fbe77a64c908eee89a01e175695ee2a54eb9b929f281a3e374bf0b856d",
}
"""sha256 of the uncompressed files of docs/results.md."""


def databases(folder: Path, local: Path | None) -> dict[str, str]:
    """The data files by part of speech, from a local folder or from the package."""
    if local:
        files = {path.suffix[1:]: path.read_text("latin-1") for path in local.glob("data.*")}
    else:
        if not (package := fetch(folder, [PACKAGE]).get(PACKAGE)):
            raise ValueError(f"apt cannot fetch {PACKAGE}: check the network, or give a DICT")
        files = {name.rpartition(".")[2]: text for name, text in members(package, r"/wordnet/data\.\w+$")}
    if missing := [f"data.{name}" for name in PARTS_OF_SPEECH if name not in files]:
        raise ValueError(f"{local or package} lacks {', '.join(missing)} of WordNet 3.0")
    return files


def synsets(files: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Id, first word and gloss with examples."""
    for name in PARTS_OF_SPEECH:
        if not (entries := SYNSET.findall(files[name])):
            raise ValueError(f"data.{name} holds no synset of a WordNet database")
        for offset, word, gloss in entries:
            yield f"{name}-{offset}", word.replace("_", " "), gloss


def texts(synset: str, word: str, gloss: str) -> Iterator[tuple[str, str]]:
    """Gloss and examples that are long enough; what follows a quotation, such as its author, belongs to no text."""
    unquoted = re.sub(r";(\s*;)+", ";", re.sub(r'"[^"]*"[^;]*', "", gloss))
    definition = " ".join(unquoted.split()).strip("; ")
    if len(definition) >= SHORTEST:
        yield synset, f"{word}: {definition}"
    for number, example in enumerate(re.findall(r'"([^"]*)"', gloss)):
        if len(example.split()) >= SHORTEST:
            yield f"{synset}-ex{number}", " ".join(example.split())


def split_of(synset: str) -> str | None:
    """By a hash, so that a gloss and its examples stay together; 4 % belong to no split."""
    percentile = int(sha256(synset.encode()).hexdigest()[:8], 16) % 100
    return None if percentile < 4 else "valid" if percentile < 7 else "train"


def write(path: Path, lines: list[str]) -> str:
    """Compress without a date; sha256 of what was compressed."""
    content = "".join(lines).encode()
    with path.open("wb") as raw, gzip.GzipFile(path.stem, "wb", fileobj=raw, mtime=0) as file:
        file.write(content)
    return sha256(content).hexdigest()


def main(folder: Path, local: Path | None) -> int:
    """Fetch, read, split, write."""
    folder.mkdir(parents=True, exist_ok=True)
    seen, lines = set[str](), {split: list[str]() for split in PUBLISHED}
    for synset, word, gloss in synsets(databases(folder.resolve(), local)):
        for name, text in texts(synset, word, gloss):
            if text not in seen and (split := split_of(synset)):
                lines[split].append(json.dumps({"id": name, "text": text}) + "\n")
            seen.add(text)
    sums = {split: write(folder / f"wordnet.{split}.jsonl.gz", lines[split]) for split in lines}
    counts = [f"{split} {len(lines[split])} lines, sha256 {sums[split]}" for split in sums]
    print(*counts, "as published" if sums == PUBLISHED else "NOT the published files", sep="; ")
    return int(sums != PUBLISHED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("dict", type=Path, nargs="?")
    try:
        sys.exit(main(*vars(parser.parse_args()).values()))
    except (OSError, ValueError, tarfile.TarError) as error:
        print(f"wordnet_corpus.py: {error}", file=sys.stderr)
        sys.exit(2)
