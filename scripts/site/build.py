"""Builds the documentation site: python scripts/site/build.py [--check-only].

Pages lie in docs/, in packages/*/docs and beside the README. They are copied to build/docs, with links rewritten to
where each page is on the site. Pages that follow from the code are generated there; a short page of the same name in
the repository says where to look without the site. Then Zensical builds build/site. A link to a file that is no page,
or to an anchor that does not exist, is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import improvements
import reference

ROOT = Path(__file__).resolve().parents[2]
STAGE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
PACKAGES = ("runwatch", "traindoctor")
LINK = re.compile(
    r"(?P<code>`+).*?(?P=code)|(?P<head>!?\[[^\]]*\]\()(?P<path>[^)#\s:]*)(?P<anchor>#[^)\s]*)?\)"
)
FENCE = re.compile(r"^( *)(```+|~~~+)")


def page_map() -> dict[Path, str]:
    """File of the repository -> its place on the site."""
    places = {
        path: str(path.relative_to(ROOT / "docs"))
        for path in sorted((ROOT / "docs").rglob("*"))
        if path.is_file()
    }
    places |= {
        ROOT / "README.md": "index.md",
        ROOT / "CHANGELOG.md": "changelog.md",
        ROOT / "LICENSE": "LICENSE.txt",
    }
    places |= {ROOT / "CONTRIBUTING.md": "contributing.md", ROOT / "examples": "examples.md"}
    places |= dict.fromkeys((ROOT / "examples").iterdir(), "examples.md")
    for name in PACKAGES:
        folder = ROOT / "packages" / name
        places[folder / "README.md"] = f"{name}/index.md"
        places |= {
            path: f"{name}/{path.name}" for path in sorted((folder / "docs").iterdir()) if path.is_file()
        }
    return places


def generated_pages() -> dict[str, str]:
    """Place on the site -> text, for pages that no file holds."""
    return {
        "commands.md": reference.commands_page(),
        "settings.md": reference.settings_page(),
        "api.md": reference.api_page(),
        "examples.md": reference.examples_page(ROOT / "examples"),
        "traindoctor/rules.md": reference.rules_page(),
    }


def rewrite_links(text: str, source: Path, place: str, places: dict[Path, str], generated: set[str]) -> str:
    """The page with its links as they are on the site; code stays as it is."""

    def moved(match: re.Match[str]) -> str:
        path, anchor = match["path"], match["anchor"] or ""
        if match["code"] or not path or path.startswith("/") or path in generated:
            return match[0]
        target = (source.parent / path).resolve()
        if target not in places:
            raise SystemExit(f"{source.relative_to(ROOT)}: link to {path}, which is no page of the site")
        if target.parent == ROOT / "examples":
            anchor = "#" + re.sub(r"[^\w]", "", target.name.lower())
        return f"{match['head']}{os.path.relpath(places[target], Path(place).parent)}{anchor})"

    lines, fence = [], ""
    for line in text.splitlines(keepends=True):
        mark = FENCE.match(line)
        if mark and (not fence or line.strip().startswith(fence)):
            fence = "" if fence else mark[2]
        lines.append(line if fence or mark or line.startswith("    ") else LINK.sub(moved, line))
    return "".join(lines)


CODED = ("troubleshooting.md", "migration.md", "bottlenecks.md")
CODE = re.compile(r"(?<![\[`\w])(M\d{3}|[A-Z]{3}\d{3})(?![\w`\]])")


def link_codes(text: str) -> str:
    """Codes of the monitor and the doctor in running text as links to what they mean."""

    def link(match: re.Match[str]) -> str:
        page = "runwatch/codes.md" if len(match[0]) == 4 else "traindoctor/rules.md"
        return f"[{match[0]}]({page}#{match[0].lower()})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else CODE.sub(link, part) for part in parts)


def stage() -> None:
    """Fill build/docs."""
    shutil.rmtree(STAGE, ignore_errors=True)
    places, generated = page_map(), generated_pages()
    names = set(generated) | {f"../{name}" for name in generated}
    for source, place in places.items():
        target = STAGE / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if place in generated or source == ROOT / "README.md" or source.suffix == ".py":
            continue
        if source.suffix == ".md":
            text = improvements.fill(source.read_text())
            text = rewrite_links(text, source, place, places, names)
            target.write_text(link_codes(text) if place in CODED else text)
        else:
            shutil.copyfile(source, target)
    for place, text in generated.items():
        (STAGE / place).write_text(text)


def check_links() -> list[str]:
    """Links inside the built site that lead to nothing."""
    pages = {path: path.read_text() for path in SITE.rglob("*.html")}
    anchors = {path.resolve(): set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    problems = []
    for path, text in pages.items():
        article = text.split("<article", 1)[-1].split("</article>", 1)[0]
        for link in re.findall(r'(?:href|src)="([^"]+)"', article):
            if re.match(r"[a-z]+:|//", link):
                continue
            place, _, anchor = link.partition("#")
            target = (path.parent / place).resolve() if place else path.resolve()
            if not target.exists() or (anchor and target in anchors and anchor not in anchors[target]):
                problems.append(f"{path.relative_to(SITE)}: {link} leads to nothing")
    return sorted(set(problems))


def main() -> None:
    """Build and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check-only", action="store_true", help="check the links of the site that was built"
    )
    if not parser.parse_args().check_only:
        build()
    if problems := check_links():
        raise SystemExit("\n".join(problems))
    print(f"site: {SITE / 'index.html'}")


def build() -> None:
    """Stage the pages and run Zensical."""
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    words = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--clean",
        "-f",
        str(ROOT / "zensical.toml"),
    ]
    if code := subprocess.run(words, check=False, cwd=ROOT).returncode:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
