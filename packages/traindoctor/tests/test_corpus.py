"""Every rule speaks where it should, is silent where it should, and its fix gives the golden file, once."""

import json
from collections import Counter
from pathlib import Path

import pytest
from traindoctor import transactions
from traindoctor.engine import Report, audit
from traindoctor.fixing import plan
from traindoctor.options import Options, load_options
from traindoctor.registry import all_rules

from .corpus_cases import FINDINGS, GOLDEN, Case, all_findings, load_cases

CASES = load_cases()
META = ("DOC002", "DOC003")


def _audit(root: Path, case: Case) -> tuple[Report, Options]:
    # The remarks about ignores need the rules that the ignores name.
    options = load_options(root, select=[] if case.code in META else [case.code], external=False)
    return audit(root, options), options


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rule_speaks_exactly_where_it_should(case: Case, tmp_path: Path) -> None:
    report, _ = _audit(case.write(tmp_path), case)
    found = [finding for finding in report.findings if finding.code == case.code]
    assert bool(found) == case.bad, [f.message for f in report.findings]


EXPECTED = json.loads(FINDINGS.read_text("utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_line_count_label_and_no_other_rule(case: Case) -> None:
    assert all_findings(case) == EXPECTED[case.name], "python -m tests.write_golden, then read the difference"


FIXABLE = [case for case in CASES if case.bad and all_rules()[case.code].fix]


@pytest.mark.parametrize("case", FIXABLE, ids=lambda case: case.name)
def test_fix_gives_the_golden_file_once_and_can_be_undone(case: Case, tmp_path: Path) -> None:
    root = case.write(tmp_path)
    before = {relative: (root / relative).read_bytes() for relative, _ in case.files}
    report, options = _audit(root, case)
    changes = plan(report, options, unsafe=True)
    golden = GOLDEN / case.name
    expected = {p.relative_to(golden).as_posix(): p.read_bytes() for p in golden.rglob("*") if p.is_file()}
    changed = {change.path: change.after for change in changes if change.after != change.before}
    assert changed == {path.removesuffix(".golden"): data for path, data in expected.items()}
    if changed:
        transactions.apply(root, changes)
        again, _ = _audit(root, case)
        assert plan(again, options, unsafe=True) == []
        assert transactions.undo(root).refused == []
    assert {relative: (root / relative).read_bytes() for relative, _ in case.files} == before


def test_every_rule_has_true_and_false_cases() -> None:
    true = Counter(case.code for case in CASES if case.bad)
    false = Counter(case.code for case in CASES if not case.bad)
    assert {code for code in all_rules() if true[code] < 2 or false[code] < 2} == set()


def test_every_fix_is_shown_by_a_golden_file() -> None:
    shown = {folder.name.split("-")[0] for folder in GOLDEN.iterdir()}
    assert shown == {code for code, rule in all_rules().items() if rule.fix}
