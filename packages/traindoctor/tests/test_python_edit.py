"""Edits of pieces are the edits of the whole file, and everything around them stays."""

import pytest
from traindoctor import python_edit
from traindoctor.examination import examine
from traindoctor.python_edit import apply_node_edits
from traindoctor.registry import all_rules
from traindoctor.types import Kind, NodeEdit, Span

from .corpus_cases import load_cases

SOURCE = """import torch

loss = (a +
        torch.log(torch.softmax(x, -1)))  # kept
loader = wrap(DataLoader(ds, batch_size=4), key=[DataLoader(
    other,  # why
    shuffle=True,
)])\tif ok else None
"""


def test_pieces_give_what_the_whole_file_gives() -> None:
    compared = 0
    for case in load_cases():
        if not case.bad or not all_rules()[case.code].fix:
            continue
        for path, text in case.files:
            if path.endswith(".py"):
                found = examine(path, Kind.PYTHON, text.encode(), frozenset([case.code])).findings
                edits = [edit for finding in found if finding.fix for edit in finding.fix.node_edits]
                assert apply_node_edits(text, edits) == python_edit._edit_module(text, edits)
                compared += bool(edits)
    assert compared > 40


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_nested_and_neighbouring_edits(newline: str) -> None:
    edits = [
        NodeEdit(Span(5, 10, 8, 4), "set_keyword", ("last", "1")),
        NodeEdit(Span(5, 15, 5, 43), "set_keyword", ("num_workers", "4")),
        NodeEdit(Span(5, 50, 8, 2), "set_keyword", ("num_workers", "4")),
        NodeEdit(Span(4, 9, 4, 40), "replace", ("torch.log_softmax(x, -1)",)),
    ]
    changed, missed = apply_node_edits(SOURCE.replace("\n", newline), edits)
    expected = (
        SOURCE.replace("torch.log(torch.softmax(x, -1))", "torch.log_softmax(x, -1)")
        .replace("batch_size=4)", "batch_size=4, num_workers=4)")
        .replace("    shuffle=True,\n", "    shuffle=True,\n    num_workers=4,\n")
        .replace(")])", ")], last=1)")
    )
    assert (changed, missed) == (expected.replace("\n", newline), set())


def test_a_part_of_a_bracketed_expression_is_edited_in_its_file() -> None:
    text = "x = (a +\n     b)\ny = 1\n"
    changed, missed = apply_node_edits(text, [NodeEdit(Span(1, 6, 2, 7), "replace", ("c",))])
    assert (changed, missed) == ("x = (c)\ny = 1\n", set())


def test_an_edit_without_a_place_is_told() -> None:
    edit = NodeEdit(Span(1, 1, 1, 4), "set_keyword", ("k", "1"))
    assert apply_node_edits("abc + f(1)\n", [edit]) == ("abc + f(1)\n", {edit})
