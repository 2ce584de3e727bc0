"""The text of "How much text one needs" in docs/results.md: python docs/results/curve_corpus.py FOLDER [SENTENCES]

Gathers English sentences from Debian packages: descriptions of all packages, dictionaries, fortunes, manual pages,
handbooks, the Bible, novels and game stories. Needs Debian 12 with apt and dpkg-deb, network, and 1.5 GB in FOLDER;
nothing is installed. Packages that are in FOLDER/packages already are not fetched again.

Written are `train.txt.xz` and `validation.txt.xz`, one sentence a line, and `sources.json`: for each source the
packages, their licences, and its sentences. Files, dictionary entries and descriptions that are chosen for validation
give nothing to training. Sentences are lower-cased, as the encoder and the tokenizer of the experiment do themselves,
and sorted, so that they compress; `curve.py` puts them into a fixed random order and takes the first N.

With --paragraphs it writes paragraphs for `slots.py` instead, `train.txt.gz` and `validation.txt.gz`, a blank line
between two: neighbouring sentences of a paragraph that are plain prose and occur nowhere else, 24 to 170 words.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import lzma
import re
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

from mmldlm.preparation.cutting import split_paragraphs, split_sentences

HELD_OUT, SHORTEST, LONGEST = 4096, 4, 32
"""Sentences held out; fewest and most words of a sentence."""
PARAGRAPHS_HELD_OUT, FEWEST, MOST = 2048, 24, 170
"""Paragraphs held out; fewest and most words of a paragraph."""
ENOUGH = 1.05
"""No further package is read once there are so many times the texts that are asked for."""
LIKE_BEGINNINGS = 20
"""Sentences that may begin with the same five words: more are a template."""
_COMMON = (
    "the of and to is are was were be been it its this that with which from not by you your he his she they their we "
    "our have has had can will if when who there"
)
COMMON = frozenset(_COMMON.split())
"""Words of English that no other language of the packages has as often."""
ODD = re.compile(r"[^\x00-\x7f]|[^\w\s,.;:'\"()?!-]|_|\.\w|\w/|://|\d{5}|\b[a-z]+[A-Z]|[(\[]\)|\b(\w+) \1\b")
PLAIN_WORD = re.compile(r"[a-z]+(['-][a-z]+)*[,.;:?!'\")]*")
Texts = Iterator[tuple[str, str]]
"""What is held out or kept as a whole, and text, with a blank line between paragraphs."""


def apt(folder: Path, *words: str, tool: str = "apt-get") -> str:
    """What apt says, with lists and cache of its own."""
    own = (
        ("Dir::State::Lists", folder / "lists"),
        ("Dir::Cache", folder / "cache"),
        ("Acquire::Languages", "en"),
    )
    options = [part for name, value in own for part in ("-o", f"{name}={value}")]
    done = subprocess.run([tool, *options, *words], capture_output=True, text=True, cwd=folder / "packages")
    return done.stdout


def fetch(folder: Path, packages: Iterable[str]) -> dict[str, Path]:
    """The packages that exist, by name."""
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not list((folder / "lists").glob("*Translation-en*")):
        apt(folder, "update")
    known = set(apt(folder, "pkgnames", tool="apt-cache").split())
    files: dict[str, Path | None] = {}
    for package in packages:
        if package in known and not list((folder / "packages").glob(f"{package}_*.deb")):
            apt(folder, "download", package)
        files |= dict.fromkeys([package], next((folder / "packages").glob(f"{package}_*.deb"), None))
    return {package: path for package, path in files.items() if path}


def raw_members(package: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Files of a package whose path matches."""
    line = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with (
        subprocess.Popen(line, stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.isfile() and re.search(pattern, member.name):
                yield member.name, archive.extractfile(member).read()  # type: ignore[union-attr]


def members(package: Path, pattern: str) -> Texts:
    """The same as text, unpacked where it is compressed."""
    for name, content in raw_members(package, pattern):
        content = gzip.decompress(content) if name.endswith((".gz", ".dz")) else content
        yield (
            name,
            content.decode("utf-8" if b"\xc3" in content or b"\xe2" in content else "latin-1", "replace"),
        )


def streams(data: bytes) -> Iterator[bytes]:
    """What is compressed by zlib somewhere in the data."""
    start = data.find(b"x\x9c")
    while start >= 0:
        stream, end = zlib.decompressobj(), start + 1
        try:
            yield stream.decompress(data[start:])
            end = len(data) - len(stream.unused_data)
        except zlib.error:
            pass
        start = data.find(b"x\x9c", end)


def licences(package: Path) -> list[str]:
    """What its copyright file names."""
    text = "".join(text for _, text in members(package, r"/doc/[^/]+/copyright$"))
    named = re.findall(r"^License: *(\S.*)$", text, re.M)
    known = re.findall(
        r"GPL-[23]|General Public License|GFDL|Free Documentation|public domain|BSD|MIT|Apache", text
    )
    return sorted({name.strip() for name in named})[:6] or sorted(set(known)) or ["see its copyright file"]


def descriptions(folder: Path) -> Texts:
    """Long descriptions of all packages of the distribution."""
    for path in (folder / "lists").glob("*Translation-en*"):
        words = ["/usr/lib/apt/apt-helper", "cat-file", str(path)]
        listed = subprocess.run(words, capture_output=True, text=True).stdout
        for entry in listed.split("\n\n"):
            lines = re.sub(r"\n \.(?=\n)", "\n", entry.partition("Description-en:")[2]).split("\n")[1:]
            prose = ["" if line.startswith(("  ", " *", " -", " o ")) else line for line in lines]
            yield entry.partition("\n")[0], "\n".join(prose)


def dictionary(package: Path) -> Texts:
    """Entries of dictd files without etymologies, sources and cross references; what comes from WordNet is left out."""
    for _, text in members(package, r"\.dict\.dz$"):
        for entry in re.split(r"\n(?=\S)", text):
            if "WordNet" in entry:  # the text of the other experiments
                continue
            prose = re.sub(
                r"\[[^]]*\]|\\[^\\\n]*\\|--[A-Z][\w. ]*$|^\s*(Syn:|See|Note:)|<[^>]*>", "", entry, flags=re.M
            )
            prose = re.sub(r"[{}]|^\s*\(?(\d+|[a-z])[.)] (\d )?|\([A-Z][a-z.]+\)", "", prose, flags=re.M)
            yield entry[:40], prose.partition("\n")[2]


def fortunes(package: Path) -> Texts:
    """Fortunes, without who said them."""
    for name, text in members(package, r"games/fortunes/[^.]+$"):
        for number, fortune in enumerate(re.split(r"\n%+\n", text)):
            yield f"{name} {number}", re.sub(r"\n\s*--.*", "", fortune, flags=re.S)


def pages(package: Path) -> Texts:
    """Paragraphs of HTML, XML and help files."""
    for name, text in members(package, r"\.(x?html?|page|xhp)(\.gz)?$"):
        if re.search(
            r"/(?!en|C/)[a-z]{2}([_-][A-Za-z]{2,4})?/", name.replace("/man/", "/")
        ):  # another language
            continue
        text = re.sub(
            r"<(script|style|pre|head|nav|code-block|programlisting)\b.*?</\1>", "\n\n", text, flags=re.S
        )
        text = re.sub(
            r"</?(p|li|dd|dt|div|td|th|tr|h\d|br|ul|ol|dl|blockquote|section|paragraph)\b[^>]*>", "\n\n", text
        )
        yield name, html.unescape(re.sub(r"<[^>]*>", "", text))


def manuals(package: Path) -> Texts:
    """Running text of manual pages."""
    for name, text in members(package, r"/man/man\d/[^/]+\.gz$"):
        text = re.sub(r"^\.(nf|EX|Bd)\b.*?^\.(fi|EE|Ed)\b", "\n", text, flags=re.S | re.M)
        text = re.sub(r"^\.(BR?|I[RB]?|R[BI]|BI) +(.*)$", lambda m: m[2].replace('"', ""), text, flags=re.M)
        text = re.sub(
            r"\\f(\[[A-Z]*\]|\(..|.)|\\[&|^/]|\\s[+-]?\d", "", re.sub(r"^[.'].*$", "\n", text, flags=re.M)
        )
        text = (
            re.sub(r"\\\(aq|\\\(cq", "'", text)
            .replace("\\-", "-")
            .replace("\\(lq", '"')
            .replace("\\(rq", '"')
        )
        yield name, text


def stories(package: Path) -> Texts:
    """What is said and told in campaigns of Wesnoth."""
    for name, text in members(package, r"\.cfg$"):
        yield name, "\n\n".join(re.findall(r'_ *"([^"#]{20,})"', text))


def verses(package: Path) -> Texts:
    """A Bible of the SWORD project, one stream a book."""
    for name, data in raw_members(package, r"\.bzz$"):
        for number, book in enumerate(streams(data)):
            text = re.sub(
                r"<note.*?</note>|<RF>.*?<Rf>|<title.*?</title>",
                "",
                book.decode("utf-8", "replace"),
                flags=re.S,
            )
            yield f"{name} {number}", re.sub(r" +(?=[,.;:?!])", "", re.sub(r"<[^>]*>", " ", text))


def novels(package: Path) -> Texts:
    """Lines of text that a package of R keeps in its data, joined to paragraphs."""
    for _, data in raw_members(package, r"/data/Rdata\.rdb$"):
        for part in streams(data):
            # a string of R: its type, its size in four bytes, itself
            spans = (
                (m.end(), int.from_bytes(m[1], "big"))
                for m in re.finditer(rb"\x00[\x04\x00][\x00\x80]\x09(.{4})", part, re.S)
            )
            lines = [
                part[start : start + size].decode("utf-8", "replace") for start, size in spans if size < 200
            ]
            for number, chapter in enumerate(re.split(r"\n(?=chapter|volume)", "\n".join(lines), flags=re.I)):
                yield f"{number} {lines[0]}", chapter


DOCUMENTS = (
    "anarchism cfi-en debian-handbook installation-guide-amd64 developers-reference debian-policy debian-faq "
    "debian-reference-en debian-history harden-doc freedombox-doc-en debian-edu-doc-en gimp-help-en "
    "gnome-user-docs libreoffice-help-en-us gnucash-docs kicad-doc-en gnome-devel-docs python3.11-doc "
    "postgresql-doc-15 openjdk-17-doc erlang-doc sqlite3-doc racket-doc ghc-doc rust-doc golang-1.19-doc "
    "nodejs-doc apache2-doc python-django-doc libstdc++-12-doc python-sympy-doc python-scipy-doc "
    "python-pandas-doc python-astropy-doc python-sklearn-doc qtbase5-doc-html cppreference-doc-en-html "
    "shorewall-doc db5.3-doc libboost1.81-doc llvm-19-doc povray-doc octave-doc maxima-doc grass-doc "
    "lilypond-doc-html csound-doc wireshark-doc dpdk-doc twisted-doc r-doc-html r-base-html linux-doc-6.1 "
    "gap-doc ghostscript-doc git-doc neutron-doc nova-doc keystone-doc cinder-doc glance-doc swift-doc heat-doc "
    "ironic-doc ceilometer-doc barbican-doc designate-doc octavia-doc manila-doc krb5-doc ntp-doc postfix-doc "
    "exim4-doc-html bacula-doc xen-doc libvirt-doc lammps-doc ns3-doc petsc3.18-doc pari-doc xorg-docs vim-doc "
    "zsh-doc"
)
MANUALS = "manpages manpages-dev perl-doc libssl-doc git-man ncurses-doc libx11-doc xorg-docs-core"
CAMPAIGNS = "httt trow utbs low nr tsg did dm dw ei l sof sota sotbe thot ttb"
SOURCES: dict[str, tuple[Callable[[Path], Texts], str]] = {
    "dictionaries": (dictionary, "dict-gcide dict-foldoc dict-jargon dict-devil"),
    "fortunes": (
        fortunes,
        "fortunes fortunes-min fortune-anarchism fortunes-debian-hints",
    ),
    "Bible": (verses, "sword-text-web"),
    "novels": (novels, "r-cran-janeaustenr"),
    "game stories": (stories, " ".join(f"wesnoth-1.16-{name}" for name in CAMPAIGNS.split())),
    "manual pages": (manuals, MANUALS),
    "documentation": (pages, DOCUMENTS),
}


SIGNS = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\xa0": " "})


def is_sentence(text: str, longest: int = LONGEST, size: int = 200) -> bool:
    """Whether this is plain English prose: mostly words in small letters, some of the commonest among them."""
    words = text.split()
    if not SHORTEST <= len(words) <= longest or len(text) > size or ODD.search(text):
        return False
    if not (text[0].isupper() or text[0] in "\"'") or not re.search(r"[.?!][\"')]*$", text):
        return False
    plain = sum(PLAIN_WORD.fullmatch(word) is not None for word in words)
    common = sum(word.lower() in COMMON for word in words)
    return plain >= 0.7 * len(words) and common >= max(1, len(words) // 6)


def order(text: str) -> bytes:
    """A fixed random order."""
    return blake2b(text.encode(), digest_size=8).digest()


def plain_words(text: str) -> list[str]:
    """Without numbers, case and signs."""
    return re.findall(r"[a-z]+", text.lower())


class Corpus:
    """Different sentences, those that are held out apart."""

    unit, ending, num_held_out = "sentences", "xz", HELD_OUT

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.beginnings: Counter[bytes] = Counter()
        self.train: list[str] = []
        self.held_out: list[str] = []

    def add(self, texts: Texts) -> int:
        """How many texts are new; numbers, case and signs alone make no difference."""
        before = len(self.train) + len(self.held_out)
        for group, text in texts:
            kept = self.held_out if order(group)[0] < 4 else self.train  # 1.6 % of the groups
            kept += (piece.lower() for piece in self.pieces(text.translate(SIGNS)))
        return len(self.train) + len(self.held_out) - before

    def pieces(self, text: str) -> Iterator[str]:
        """What is kept of a text."""
        for sentence in split_sentences(text):
            if is_sentence(sentence) and self._is_new(sentence):
                yield sentence

    def _is_new(self, text: str) -> bool:
        words = plain_words(text)
        key, beginning = order(" ".join(words)), order(" ".join(words[:5]))
        if key in self.keys or self.beginnings[beginning] >= LIKE_BEGINNINGS:
            return False
        self.keys.add(key)
        self.beginnings[beginning] += 1
        return True


class Paragraphs(Corpus):
    """Runs of sentences, each of one paragraph; no sentence is in two of them."""

    unit, ending, num_held_out = "paragraphs", "gz", PARAGRAPHS_HELD_OUT

    def pieces(self, text: str) -> Iterator[str]:
        """Neighbouring plain sentences together as long as they fit."""
        for paragraph in split_paragraphs(text):
            if len(paragraph.split()) < FEWEST:
                continue
            run: list[str] = []
            for sentence in (*split_sentences(paragraph), ""):
                plain = is_sentence(sentence, 60, 400) and self._key(sentence) not in self.keys
                if not plain or len(" ".join([*run, sentence]).split()) > MOST:
                    yield from self._whole(run)
                    run = []
                run += [sentence] * plain

    def _whole(self, run: list[str]) -> Iterator[str]:
        text = " ".join(run)
        if len(text.split()) >= FEWEST and self._is_new(text):
            self.keys.update(map(self._key, run))
            yield text

    @staticmethod
    def _key(sentence: str) -> bytes:
        return order(" ".join(plain_words(sentence)))


def write(path: Path, texts: Iterable[str]) -> None:
    """One text a line, sorted and compressed; paragraphs with a blank line after each."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(f"{line}\n\n" for line in sorted(texts)).encode(), mtime=0))
    else:
        path.write_bytes(lzma.compress("".join(f"{line}\n" for line in sorted(texts)).encode(), preset=6))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def main(folder: Path, most: int, corpus: Corpus) -> None:
    """Fetch, read, clean, write."""
    unit, sources = corpus.unit, {}
    files = fetch(folder, [package for _, packages in SOURCES.values() for package in packages.split()])
    sources["package descriptions"] = {
        unit: corpus.add(descriptions(folder)),
        "licence": "of each package",
    }
    print(f"package descriptions: {len(corpus.train)}", flush=True)
    for name, (read, packages) in SOURCES.items():
        parts = {}
        for package in [package for package in packages.split() if package in files]:
            if len(corpus.train) >= ENOUGH * most:
                break
            parts[package] = {
                unit: corpus.add(read(files[package])),
                "licence": licences(files[package]),
            }
            print(f"{name}, {package}: {parts[package][unit]}", flush=True)
        sources[name] = {unit: sum(part[unit] for part in parts.values()), "packages": parts}
    train = sorted(corpus.train, key=order)
    totals = {"train": len(train), "held out": len(corpus.held_out), "characters": sum(map(len, train))}
    print(json.dumps(totals | {name: source[unit] for name, source in sources.items()}, indent=1))
    held_out = sorted(corpus.held_out, key=order)[: corpus.num_held_out]
    write(folder / f"validation.txt.{corpus.ending}", held_out)
    write(folder / f"train.txt.{corpus.ending}", train[:most])
    (folder / "sources.json").write_text(json.dumps({"totals": totals, "sources": sources}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("most", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--paragraphs", action="store_true")
    words = parser.parse_args()
    main(words.folder, words.most, Paragraphs() if words.paragraphs else Corpus())
