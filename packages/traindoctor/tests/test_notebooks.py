"""Notebooks: found as in a Python file, mended as a Python file, and not a byte of the rest changed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traindoctor import transactions
from traindoctor.cli import app
from traindoctor.engine import audit
from traindoctor.examination import examine
from traindoctor.fixing import FileChange, plan
from traindoctor.notebook import NotebookSource
from traindoctor.notebook_json import read_cells
from traindoctor.notebook_rewrite import rewrite
from traindoctor.options import load_options
from traindoctor.registry import all_rules
from traindoctor.source import UnreadableError, read_source
from traindoctor.types import Finding, Fix, Kind, NodeEdit, Span, TextEdit
from typer.testing import CliRunner

from .corpus_cases import GOLDEN, Case, load_cases
from .notebook_files import as_notebook, as_python, code, codes_of, cut, markdown, notebook, write
from .sarif_schema import problems

ADAM = "opt = torch.optim.AdamW(p())"
FUSED = "opt = torch.optim.AdamW(p(), fused=True)"


def _source(*cells: Any, **about: Any) -> NotebookSource:
    data = json.dumps(notebook(*cells, **about)).encode()
    source = read_source("n.ipynb", Kind.NOTEBOOK, data)
    assert isinstance(source, NotebookSource)
    return source


def _found(root: Path, **choices: Any) -> list[Finding]:
    return audit(root, load_options(root, external=False, **choices)).findings


def _fix(root: Path, **choices: Any) -> list[FileChange]:
    options = load_options(root, external=False, **choices)
    return plan(audit(root, options), options, unsafe=True)


def _places(root: Path, *cells: Any) -> list[tuple[str, str]]:
    write(root / "n.ipynb", notebook(*cells))
    return [(finding.code, finding.where) for finding in _found(root)]


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        "%matplotlib inline",
        "!pip install torch 'it",
        "!pip install \\\n  --quiet \\\n  torch",
        "import os\nif os.name:\n    !ls -la\n    %cd ..",
        "files = !ls\na, b = %sx ls",
        "torch?\n?torch\ntorch.optim??\ntorch.load? # how",
        "pip install torch\n%pip list\ncd ..",
        "x = '''\n%d\n!x\n?\n'''\n!ls",
        "x = (1\n  % 2)\n%time f(x)",
        "x = 7 \\\n  % 2\n%load_ext autoreload",
        "plt.plot(x);\nawait main()\nasync with a as b:\n    pass",
        "%%time\nx = 1",
        "%%bash\nif [ -f x ]; then echo 'open; fi",
        "\n\n%%writefile train.py\nthis is ( not read",
        "%%html\n<p>it's</p>\r\n<br>",
        "text = 'caf\u00e9 \u4e16 \U0001f600'  # \u2028",
        "def f():\r\n    %timeit g()\r\n    return 1\r\n",
        "a = 1\rb = 2\r",
    ],
)
def test_lines_of_ipython_neither_break_the_parse_nor_move_a_line(before: str, tmp_path: Path) -> None:
    count = len(before.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").split("\n"))
    behind = f"{before.rstrip()}\n{ADAM}" if not before.lstrip().startswith("%%") else f"# more\n{ADAM}"
    line = count + 1 if not before.lstrip().startswith("%%") else 2
    places = _places(tmp_path, "import torch", before, ADAM, behind)
    assert places == [("OPT001", "cell 3:1:7"), ("OPT001", f"cell 4:{line}:7")]


def test_cells_are_counted_as_jupyter_numbers_a_fresh_run(tmp_path: Path) -> None:
    raw = {"cell_type": "raw", "metadata": {}, "source": ADAM}
    cells = [markdown("# a"), "import torch", "", "  \n", raw, f"# only this\n{ADAM}", code(f"\n{ADAM}\n")]
    assert _places(tmp_path, *cells) == [("OPT001", "cell 2:2:7"), ("OPT001", "cell 3:2:7")]


def test_a_cell_that_does_not_parse_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    cells = ["import torch", "x = 1\nprint 'two'", ADAM, "x = (", "y = '\ud800'"]
    data = json.dumps(notebook(*cells)).encode()
    (tmp_path / "n.ipynb").write_bytes(data)
    found = _found(tmp_path)
    assert [(f.code, f.where) for f in found] == [("DOC001", "cell 2:2:1"), ("OPT001", "cell 3:1:7")]
    assert "nor were 2 more of 5 code cells" in found[0].message
    (change,) = _fix(tmp_path)
    assert change.after == data.replace(b"AdamW(p())", b"AdamW(p(), fused=True)")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not a whole notebook in JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a whole notebook in JSON"),
        (json.dumps(notebook("x = 1")).encode()[:-40], "not a whole notebook in JSON"),
        (json.dumps(notebook("x = 1")).encode() + b"}", "extra data: line 1"),
        (json.dumps(notebook("x = 1"), indent=1).encode().replace(b"],\n", b"]\n", 1), ": line 18, column"),
        (b"{}", "no nbformat"),
        (b"[1, 2]", "no object"),
        (b'{"nbformat": 2, "worksheets": []}', "nbformat 2"),
        (b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": 3}]}', "neither a string nor a list"),
        (b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": ["a", 3]}]}', "neither a string nor"),
        (b'{"nbformat": 4, "cells": [3]}', "expected '{'"),
        (b'{"nbformat": 4, "cells": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"nbformat": 4, "cells": [{"source": "\xe9"}]}', "not utf-8"),
        ("\ufeff{}".encode("utf-16"), "NUL bytes"),
    ],
)
def test_a_bad_notebook_is_one_line(data: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "n.ipynb").write_bytes(data)
    (finding,) = _found(tmp_path)
    assert (finding.code, finding.where) == ("DOC001", "1:1")
    assert told in finding.message
    assert "\n" not in finding.message
    assert _fix(tmp_path) == []


def test_what_is_not_python_or_not_there_is_silent(tmp_path: Path) -> None:
    kernel = {"kernelspec": {"language": "R", "name": "ir"}}
    write(tmp_path / "r.ipynb", notebook("x <- torch.utils.checkpoint.checkpoint(p)", metadata=kernel))
    write(tmp_path / "julia.ipynb", notebook("x = [1; 2]", metadata={"language_info": {"name": "julia"}}))
    write(tmp_path / "empty.ipynb", notebook())
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write(tmp_path / ".ipynb_checkpoints" / "n.ipynb", notebook(f"import torch\n{ADAM}"))
    assert _found(tmp_path) == []


def test_large_outputs_are_read_over(tmp_path: Path) -> None:
    cell = code(["import torch\n", ADAM])
    cell["outputs"] = [{"data": {"image/png": "A" * 5_000_000}, "output_type": "display_data"}]
    data = write(tmp_path / "n.ipynb", notebook(cell))
    (change,) = _fix(tmp_path)
    assert change.after == data.replace(b"AdamW(p())", b"AdamW(p(), fused=True)")


def test_ignores_count_inside_their_cell(tmp_path: Path) -> None:
    load = "x = torch.utils.checkpoint.checkpoint(p)"
    places = _places(
        tmp_path,
        "import torch",
        f"{load}  # doctor: ignore[MEM001] ours",
        f"# doctor: ignore[MEM001] ours\n{load}\n# doctor: ignore[MEM001] speaks for nothing",
        load,
    )
    assert places == [("DOC003", "cell 3:3:1"), ("MEM001", "cell 4:1:5")]
    assert _places(tmp_path, "import torch\n# doctor: ignore-file[MEM] ours", load, load) == []


def test_variables_that_a_magic_sets_are_known(tmp_path: Path) -> None:
    for line in ("%env NCCL_TIMEOUT=7200", "  %set_env NCCL_TIMEOUT 7200"):
        write(tmp_path / "n.ipynb", notebook(f"if x:\n {line}" if line[0] == " " else f"\n{line}"))
        (finding,) = _found(tmp_path)
        assert (finding.code, finding.where, finding.fix) == ("NCC002", "cell 1:2:1", None)
    assert _places(tmp_path, "%env NCCL_TIMEOUT\n%env NCCL_TIMEOUT={x}\n%env NCCL_TIMEOUT=$x\n%env") == []


def test_a_value_from_the_shell_is_not_known(tmp_path: Path) -> None:
    loader = "from torch.utils.data import DataLoader\nloader = DataLoader(d, num_workers=int(n[0]))"
    assert _places(tmp_path, "n = !nproc", loader) == []


# --- the same as a Python file --------------------------------------------------------------------------------------


def _cases() -> list[Case]:
    """The first bad case of every rule that speaks about Python."""
    first: dict[str, Case] = {}
    for case in load_cases():
        if case.bad and case.code != "DOC001" and any(name.endswith(".py") for name, _ in case.files):
            first.setdefault(case.code, case)
    return list(first.values())


def _write_as_notebooks(case: Case, root: Path) -> None:
    for relative, text in case.files:
        target = root / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if relative.endswith(".py"):
            write(target.with_suffix(".ipynb"), as_notebook(text))
        else:
            target.write_text(text, "utf-8")


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_rules_say_and_do_the_same_as_in_a_python_file(case: Case, tmp_path: Path) -> None:
    choice = [] if case.code.startswith("DOC") else [case.code]
    case.write(tmp_path / "python")
    _write_as_notebooks(case, tmp_path / "cells")
    starts = {}
    for relative, text in case.files:
        if relative.endswith(".py"):
            parts = [0, *(part.count("\n") for part in cut(text))]
            starts[relative[:-3] + ".ipynb"] = [sum(parts[: n + 1]) for n in range(len(parts))]
    expected = {(f.code, Path(f.path).stem, f.span) for f in _found(tmp_path / "python", select=choice)}
    found = set()
    for finding in _found(tmp_path / "cells", select=choice):
        span = finding.span
        if finding.place is not None:
            first, span = starts[finding.path][finding.place.cell - 1], finding.place.span
            span = Span(span.line + first, span.column, span.end_line + first, span.end_column)
        found.add((finding.code, Path(finding.path).stem, span))
    assert found == expected
    if all_rules()[case.code].fix:
        golden = {
            path.relative_to(GOLDEN / case.name).with_suffix("").as_posix(): path.read_text("utf-8")
            for path in (GOLDEN / case.name).rglob("*.golden")
        }
        changes = _fix(tmp_path / "cells", select=choice)
        assert {
            change.path.replace(".ipynb", ".py"): as_python(change.after)
            if change.kind is Kind.NOTEBOOK
            else change.after.decode()
            for change in changes
            if change.after != change.before
        } == golden


# --- writing --------------------------------------------------------------------------------------------------------

_TEXT = st.text(st.sampled_from("ab \n\r\t\"\\/'%#\u00e9\u2028\U0001f600\ud800\0"), max_size=12)


def _dumped(draw: st.DrawFn, content: Any) -> str:
    return json.dumps(
        content,
        indent=draw(st.sampled_from([None, 1, 4, "\t"])),
        ensure_ascii=True,
        separators=draw(st.sampled_from([None, (",", ":"), (" , ", " : ")])),
    )


@st.composite
def _notebooks(draw: st.DrawFn) -> str:
    """The text of a notebook whose cells hold a string or a list of strings, cut anywhere, escaped in many ways."""
    sources = draw(st.lists(st.one_of(_TEXT, st.lists(_TEXT, max_size=4)), min_size=1, max_size=3))
    raw = _dumped(draw, notebook(*[code(source) for source in sources]))
    if draw(st.booleans()):
        raw = raw.replace("\\u00e9", "\u00e9").replace("\\u2028", "\u2028").replace("/", "\\/")
    return raw


@settings(max_examples=60, deadline=None)
@given(raw=_notebooks(), data=st.data())
def test_a_changed_cell_is_read_back_and_nothing_else_moves(raw: str, data: st.DataObject) -> None:
    cells = read_cells(raw)
    assert [cell.text for cell in cells] == [text for text in codes_of(raw.encode()) if text.strip()]
    assert rewrite(raw, [(cell, cell.text) for cell in cells]) == raw
    if not cells:
        return
    index = data.draw(st.integers(0, len(cells) - 1))
    old = cells[index].text
    at = data.draw(st.integers(0, len(old)))
    end = data.draw(st.integers(at, len(old)))
    new = old[:at] + data.draw(_TEXT) + "x" + old[end:]
    changed = rewrite(raw, [(cells[index], new)])
    before, after = json.loads(raw), json.loads(changed)
    assert [c.text for c in read_cells(changed)] == [
        new if n == index else c.text for n, c in enumerate(cells)
    ]
    first, last = cells[index].pieces[0].start, cells[index].pieces[-1].end
    assert changed.startswith(raw[:first])
    assert changed.endswith(raw[last:])
    for content in (before, after):
        for cell in content["cells"]:
            cell.pop("source")
    assert before == after


@settings(max_examples=60, deadline=None)
@given(raw=_notebooks())
def test_a_notebook_is_read_and_written_byte_for_byte(raw: str) -> None:
    data = raw.encode()
    source = read_source("n.ipynb", Kind.NOTEBOOK, data)
    assert source.encode(source.text) == data
    assert [f.code for f in examine("n.ipynb", Kind.NOTEBOOK, data, frozenset()).findings] in ([], ["DOC001"])


@pytest.mark.parametrize("kind", ["jupyter", "one line", "tabs", "escaped", "crlf", "mark", "string", "old"])
def test_only_the_fixed_characters_change(kind: str, tmp_path: Path) -> None:
    shown = f"!pip install caf\u00e9\nimport torch\n{ADAM}  # caf\u00e9\nx?"
    cell = code(shown) if kind == "string" else code(shown.splitlines(keepends=True))
    content = notebook(markdown("# \u00e9"), cell, "y = 1")
    if kind == "old":
        cells = [
            {"cell_type": "code", "language": "python", "input": c["source"]} for c in content.pop("cells")
        ]
        content |= {"nbformat": 3, "worksheets": [{"metadata": {}, "cells": cells[1:]}]}
    styles: dict[str, Any] = {"one line": {}, "tabs": {"indent": "\t"}, "escaped": {"indent": 2}}
    raw = json.dumps(content, ensure_ascii=kind == "escaped", **styles.get(kind, {"indent": 1})) + "\n"
    data = raw.replace("\n", "\r\n" if kind == "crlf" else "\n").encode()
    data = b"\xef\xbb\xbf" + data if kind == "mark" else data
    (tmp_path / "n.ipynb").write_bytes(data)
    changes = _fix(tmp_path)
    assert changes[0].after == data.replace(b"AdamW(p())", b"AdamW(p(), fused=True)")
    transactions.apply(tmp_path, changes)
    assert _fix(tmp_path) == []
    assert transactions.undo(tmp_path).refused == []
    assert (tmp_path / "n.ipynb").read_bytes() == data


def test_a_line_is_added_to_a_list_of_lines(tmp_path: Path) -> None:
    cell = "import torch\nopt = torch.optim.AdamW(\n    p(),\n    lr=1,\n)"
    data = write(tmp_path / "n.ipynb", notebook("%cd x", cell))
    (change,) = _fix(tmp_path)
    assert codes_of(change.after) == ["%cd x", cell.replace("lr=1,\n", "lr=1,\n    fused=True,\n")]
    line = b'    "    lr=1,\\n",\n'
    assert change.after == data.replace(line, line + line.replace(b"lr=1", b"fused=True"))


def test_no_edit_leaves_its_cell_or_touches_a_line_of_ipython() -> None:
    source = _source("x = f(\n 1)\n!ls\ny = 2", "z = 3")
    assert source.line_name(6) == source.line_name(7) == "cell 2, line 1"

    def allowed(*place: int) -> bool:
        node = Fix("", True, node_edits=(NodeEdit(Span(*place), "replace", ("0",)),))
        start, end = source.offset(*place[:2]), source.offset(*place[2:])
        text = Fix("", True, text_edits=(TextEdit(start, end, "0"),))
        assert source.allows(node) == source.allows(text)
        return source.allows(node)

    assert allowed(2, 5, 3, 4)
    assert allowed(7, 1, 7, 6)
    assert not allowed(4, 1, 4, 2)
    assert not allowed(3, 1, 5, 2)
    assert not allowed(5, 1, 7, 2)
    assert not allowed(1, 1, 1, 3)
    lines = source.text.splitlines(keepends=True)
    for gone, reason in ((0, "one cell into another"), (3, "remove a line"), (5, "one cell into another")):
        with pytest.raises(UnreadableError, match=reason):
            source.encode("".join(lines[:gone] + lines[gone + 1 :]))
    with pytest.raises(UnreadableError, match="touch a line"):
        source.encode(source.text.replace("!ls", "!rm"))


def test_what_may_not_be_edited_is_reported_without_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "n.ipynb", notebook(f"import torch\n{ADAM}"))
    assert [finding.fix is None for finding in _found(tmp_path)] == [False]
    monkeypatch.setattr(NotebookSource, "allows", lambda *_: False)
    assert [finding.fix is None for finding in _found(tmp_path)] == [True]
    assert _fix(tmp_path) == []


def test_a_cell_that_holds_the_tag_is_still_taken_apart() -> None:
    source = _source("# %%doctor cell 1\n!ls", "# %%doctor 0: x\n# %%%doctor cell 2\n%cd x")
    assert source.encode(source.text) == source.data
    changed = source.encode(source.text.replace("doctor 0: x", "doctor 0: y"))
    assert codes_of(changed) == ["# %%doctor cell 1\n!ls", "# %%doctor 0: y\n# %%%doctor cell 2\n%cd x"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_hidden_lines_come_back_whatever_ends_a_line(end: str) -> None:
    cell = end.join(["!ls", "if x:", "    %cd y", "    x = 1", "files = !ls", "x?", "%time \u00e9", "# end"])
    source = _source(cell, "%%bash" + end + "echo", "y = 1")
    changed = source.encode(source.text.replace("= 1", "= 2"))
    assert codes_of(changed) == [cell.replace("= 1", "= 2"), f"%%bash{end}echo", "y = 2"]


def test_imports_of_a_later_cell_do_not_refuse_a_fix(tmp_path: Path) -> None:
    future = "from __future__ import annotations"
    write(tmp_path / "n.ipynb", notebook("import torch", f"{future}\n{ADAM}\nawait f()", "return 3"))
    (change,) = _fix(tmp_path)
    assert change.refused == []
    assert codes_of(change.after)[1] == f"{future}\n{FUSED}\nawait f()"


# --- what people see ------------------------------------------------------------------------------------------------


def _run(*words: object) -> str:
    return CliRunner().invoke(app, [str(word) for word in words]).output


def test_every_format_names_cell_and_line(tmp_path: Path) -> None:
    data = write(tmp_path / "n.ipynb", notebook("import torch\n!ls", f"\n{ADAM}"))
    real = next(n for n, line in enumerate(data.decode().split("\n"), 1) if "AdamW" in line)
    text = _run("check", tmp_path, "--no-external")
    assert f"{tmp_path}/n.ipynb:cell 2:2:7: OPT001" in text
    (found,) = json.loads(_run("check", tmp_path, "--no-external", "--output-format", "json"))["findings"]
    assert [found[key] for key in ("cell", "line", "column", "end_line", "end_column")] == [2, 2, 7, 2, 29]
    sarif = json.loads(_run("check", tmp_path, "--no-external", "--output-format", "sarif"))
    assert problems(sarif) == []
    (result,) = sarif["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": real, "endLine": real}
    assert result["message"]["text"].startswith("cell 2, line 2: ")
    github = _run("check", tmp_path, "--no-external", "--output-format", "github")
    assert f"n.ipynb,line={real},endLine={real},title=OPT001::OPT001 cell 2, line 2: " in github


def test_the_diff_shows_cells_and_writes_nothing(tmp_path: Path) -> None:
    data = write(tmp_path / "n.ipynb", notebook("import torch\n!ls", f"%time x\n{ADAM}"))
    output = _run("fix", tmp_path, "--diff", "--unsafe")
    assert (
        "--- a/n.ipynb:cell 2\n+++ b/n.ipynb:cell 2\n@@ -1,2 +1,2 @@\n"
        f" %time x\n-{ADAM}\n+{FUSED}\n" in output
    )
    assert (tmp_path / "n.ipynb").read_bytes() == data
    assert "1 fix in 1 file," in _run("fix", tmp_path / "n.ipynb", "--apply", "--unsafe")
    assert "nothing to fix" in _run("fix", tmp_path, "--apply", "--unsafe")
    assert "1 restored" in _run("undo", tmp_path)
    assert (tmp_path / "n.ipynb").read_bytes() == data
