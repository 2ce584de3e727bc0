"""Writing and taking back: to the byte, whatever the file looks like and whatever happens in between."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traindoctor import transactions
from traindoctor.engine import audit
from traindoctor.errors import UserError
from traindoctor.fixing import FileChange, plan
from traindoctor.options import load_options
from traindoctor.types import Kind

BAD_PYTHON = "import torch\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
BAD_SHELL = "#!/bin/bash\nexport TORCH_NCCL_ENABLE_MONITORING=0\n"


def _fix(root: Path, unsafe: bool = True) -> list[FileChange]:
    options = load_options(root, external=False)
    return plan(audit(root, options), options, unsafe=unsafe)


def _project(root: Path) -> Path:
    (root / "a").mkdir(parents=True)
    (root / "a" / "train.py").write_text(BAD_PYTHON)
    (root / "run.sh").write_text(BAD_SHELL)
    return root


def test_apply_and_undo_restore_every_byte_and_mode(tmp_path: Path) -> None:
    root = _project(tmp_path)
    (root / "run.sh").chmod(0o750)
    before = {p: p.read_bytes() for p in (root / "a" / "train.py", root / "run.sh")}
    done = transactions.apply(root, _fix(root))
    assert "fused=True" in (root / "a" / "train.py").read_text()
    assert stat.S_IMODE((root / "run.sh").stat().st_mode) == 0o750
    assert {record.path for record in done.files} == {"a/train.py", "run.sh"}
    assert (root / ".traindoctor" / "transactions" / done.id / "before" / "a" / "train.py").is_file()
    assert transactions.undo(root).refused == []
    assert {p: p.read_bytes() for p in before} == before
    assert stat.S_IMODE((root / "run.sh").stat().st_mode) == 0o750
    assert [entry.state for entry in transactions.history(root)] == ["undone"]


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + BAD_PYTHON.encode(),
        BAD_PYTHON.replace("\n", "\r\n").encode(),
        BAD_PYTHON.rstrip("\n").encode(),
        b"# -*- coding: latin-1 -*-\nname = 'J\xf6rg'\n" + BAD_PYTHON.encode(),
        b"# -*- coding: cp1252 -*-\r\nname = '\x80'\r\n" + BAD_PYTHON.replace("\n", "\r\n").encode(),
        ("x = '\u2028 \u00e9 \U0001f600'; " + BAD_PYTHON).encode(),
        b"\x0c\n" + BAD_PYTHON.encode(),
        b"if True:\n\timport torch\n\toptimizer = torch.optim.SGD(p(),\tlr=1)\t# tab\n",
        BAD_PYTHON.replace("lr=1e-4", "lr=1e-4, # why\n    betas=(0.9, 0.95) # two\n  ").encode(),
    ],
    ids=["bom", "crlf", "no-newline", "latin-1", "cp1252", "unicode", "form-feed", "tabs", "comments"],
)
def test_odd_files_keep_everything_but_the_fix(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(data)
    changes = _fix(tmp_path)
    assert len(changes) == 1
    assert b"fused=True" in changes[0].after
    kept = changes[0].after.replace(b"fused=True", b"")
    assert [word for word in data.split() if word.strip(b",)") not in kept] == []
    transactions.apply(tmp_path, changes)
    assert compile(file.read_bytes(), "train.py", "exec")
    assert _fix(tmp_path) == []
    transactions.undo(tmp_path)
    assert file.read_bytes() == data


def test_edit_changes_nothing_but_its_place(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbfimport torch\r\n\r\nx=torch.optim.AdamW( p ,lr=1 )  # odd   \r\n\r\n"
    (tmp_path / "t.py").write_bytes(data)
    (change,) = _fix(tmp_path)
    assert change.after == data.replace(b"lr=1 )", b"lr=1, fused=True)")


def test_undo_refuses_only_the_file_that_was_changed_since(tmp_path: Path) -> None:
    root = _project(tmp_path)
    before = (root / "run.sh").read_bytes()
    transactions.apply(root, _fix(root))
    (root / "a" / "train.py").write_text("mine = 1\n")
    result = transactions.undo(root)
    assert result.restored == ["run.sh"]
    assert [path for path, _ in result.refused] == ["a/train.py"]
    assert (root / "run.sh").read_bytes() == before
    assert (root / "a" / "train.py").read_text() == "mine = 1\n"


def test_undo_of_an_older_transaction_names_the_newer_one(tmp_path: Path) -> None:
    root = _project(tmp_path)
    options = load_options(root, select=["OPT001"], external=False)
    first = transactions.apply(root, plan(audit(root, options), options, unsafe=True))
    file = root / "a" / "train.py"
    change = FileChange("a/train.py", Kind.PYTHON, file.read_bytes(), file.read_bytes() + b"# more\n")
    second = transactions.apply(root, [change])
    result = transactions.undo(root, first.id)
    assert second.id in result.refused[0][1]
    transactions.undo(root, second.id)
    assert transactions.undo(root, first.id).refused == []
    assert file.read_text() == BAD_PYTHON


def test_crash_between_writes_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _project(tmp_path)
    before = {p: p.read_bytes() for p in (root / "a" / "train.py", root / "run.sh")}
    changes = _fix(root)

    def die(*_: object) -> None:
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        real = transactions.write_atomically
        calls = {"targets": 0}

        def write(target: Path, data: bytes, **flush: bool) -> None:
            if ".traindoctor" not in str(target):
                calls["targets"] += 1
                if calls["targets"] == 2:
                    die()
            real(target, data, **flush)

        transactions.write_atomically = write  # type: ignore[assignment]
        transactions.apply(root, changes)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert [entry.state for entry in transactions.history(root)] == ["prepared"]
    assert {p: p.read_bytes() for p in before} != before
    assert [undone.refused for undone in transactions.recover(root)] == [[]]
    assert {p: p.read_bytes() for p in before} == before


def test_full_disk_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _project(tmp_path)
    before = {p: p.read_bytes() for p in (root / "a" / "train.py", root / "run.sh")}
    real = transactions.write_atomically

    def full(target: Path, data: bytes, **flush: bool) -> None:
        if target.name == "run.sh" and b"=1" in data and ".traindoctor" not in str(target):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(target, data, **flush)

    monkeypatch.setattr(transactions, "write_atomically", full)
    with pytest.raises(UserError, match=r"no space left.*nothing was changed"):
        transactions.apply(root, _fix(root))
    assert {p: p.read_bytes() for p in before} == before
    assert transactions.history(root) == []


def test_read_only_file_stops_before_anything_is_written(tmp_path: Path) -> None:
    root = _project(tmp_path)
    (root / "run.sh").chmod(0o444)
    with pytest.raises(UserError, match=r"run\.sh: the file is read-only.*nothing was changed"):
        transactions.apply(root, _fix(root))
    assert (root / "a" / "train.py").read_text() == BAD_PYTHON
    assert transactions.history(root) == []


def test_file_changed_during_the_audit_is_not_overwritten(tmp_path: Path) -> None:
    root = _project(tmp_path)
    changes = _fix(root)
    (root / "run.sh").write_text("echo mine\n")
    with pytest.raises(UserError, match="changed while it was audited"):
        transactions.apply(root, changes)
    assert (root / "a" / "train.py").read_text() == BAD_PYTHON


def test_hard_links_are_not_split(tmp_path: Path) -> None:
    root = _project(tmp_path)
    os.link(root / "run.sh", tmp_path / "other.txt")
    with pytest.raises(UserError, match="2 hard links"):
        transactions.apply(root, _fix(root))


def test_link_given_as_root_is_edited_at_its_target(tmp_path: Path) -> None:
    real = tmp_path / "real.py"
    real.write_text(BAD_PYTHON)
    link = tmp_path / "link.py"
    link.symlink_to(real)
    transactions.apply(link, _fix(link))
    assert link.is_symlink()
    assert "fused=True" in real.read_text()
    transactions.undo(link)
    assert link.is_symlink()
    assert real.read_text() == BAD_PYTHON


def test_journal_is_invisible_to_git(tmp_path: Path) -> None:
    root = _project(tmp_path)
    transactions.apply(root, _fix(root))
    assert (root / ".traindoctor" / ".gitignore").read_text() == "*\n"


STATEMENTS = st.sampled_from(
    [
        "optimizer = torch.optim.AdamW(model.parameters())",
        "optimizer = torch.optim.SGD(  p, lr=1, # why\n    momentum=0.9)",
        "state = torch.load(path)",
        "with torch.cuda.amp.autocast():\n    y = 1",
        "y = torch.log(torch.softmax(torch.load(path), -1))",
        "z = torch.utils.checkpoint.checkpoint(f, torch.load(p))",
        "# torch.load(path)",
        "text = 'torch.load(path)'",
        "name = 'ä 😀'",
        "",
    ]
)


@given(
    files=st.lists(st.lists(STATEMENTS, max_size=6), min_size=1, max_size=3),
    newline=st.sampled_from(["\n", "\r\n"]),
    steps=st.lists(st.sampled_from(["safe", "unsafe", "undo"]), min_size=1, max_size=6),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_sequence_of_apply_and_undo_leads_back(
    files: list[list[str]], newline: str, steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("p")
    for number, statements in enumerate(files):
        text = newline.join(["import torch", *(s.replace("\n", newline) for s in statements)])
        (root / f"f{number}.py").write_bytes(text.encode())
    states = [{p.name: p.read_bytes() for p in root.glob("*.py")}]
    for step in steps:
        if step == "undo":
            if len(states) > 1:
                assert transactions.undo(root).refused == []
                states.pop()
        else:
            changes = [c for c in _fix(root, unsafe=step == "unsafe") if c.after != c.before]
            if changes:
                transactions.apply(root, changes)
                states.append({p.name: p.read_bytes() for p in root.glob("*.py")})
                assert [c for c in _fix(root, unsafe=step == "unsafe") if c.after != c.before] == []
        assert {p.name: p.read_bytes() for p in root.glob("*.py")} == states[-1]
        for source in root.glob("*.py"):
            compile(source.read_bytes(), source.name, "exec")
    while len(states) > 1:
        transactions.undo(root)
        states.pop()
    assert {p.name: p.read_bytes() for p in root.glob("*.py")} == states[0]


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    root = _project(tmp_path)
    before = sorted(root.rglob("*"))
    _fix(root)
    assert transactions.history(root) == []
    assert transactions.recover(root) == []
    with pytest.raises(UserError, match="nothing to undo"):
        transactions.undo(root)
    assert sorted(root.rglob("*")) == before


def test_two_doctors_do_not_write_at_once(tmp_path: Path) -> None:
    root = _project(tmp_path)
    changes = _fix(root)
    with transactions._locked(root), pytest.raises(UserError, match="another doctor is writing"):
        transactions.apply(root, changes)
    transactions.apply(root, changes)


def test_interrupt_right_after_a_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _project(tmp_path)
    before = {p: p.read_bytes() for p in (root / "a" / "train.py", root / "run.sh")}
    write = transactions.write_atomically

    def interrupted(target: Path, data: bytes, **flush: bool) -> None:
        write(target, data, **flush)
        if target.name == "run.sh" and data not in before.values():
            raise KeyboardInterrupt  # the file is replaced, but the caller never hears of it

    changes = _fix(root)
    monkeypatch.setattr(transactions, "write_atomically", interrupted)
    with pytest.raises(KeyboardInterrupt):
        transactions.apply(root, changes)
    assert {p: p.read_bytes() for p in before} == before
    assert transactions.history(root) == []


def test_failed_roll_back_keeps_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _project(tmp_path)
    before = {p: p.read_bytes() for p in (root / "a" / "train.py", root / "run.sh")}
    write = transactions.write_atomically

    def full(target: Path, data: bytes, **flush: bool) -> None:
        if target == root / "run.sh" or (target in before and data == before[target]):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        write(target, data, **flush)

    changes = _fix(root)
    monkeypatch.setattr(transactions, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        transactions.apply(root, changes)
    monkeypatch.undo()
    assert "fused=True" in (root / "a" / "train.py").read_text()
    assert transactions.undo(root).refused == []
    assert {p: p.read_bytes() for p in before} == before


def test_recovery_removes_temporary_files_and_a_lost_copy_is_refused(tmp_path: Path) -> None:
    root = _project(tmp_path)
    done = transactions.apply(root, _fix(root))
    manifest = root / ".traindoctor" / "transactions" / done.id / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"applied"', '"prepared"'))
    leftover = root / ".run.sh.abc123.traindoctor"
    leftover.write_bytes(b"half")
    (manifest.parent / "before" / "a" / "train.py").unlink()
    result = transactions.undo(root)
    assert not leftover.exists()
    assert result.restored == ["run.sh"]
    assert [path for path, _ in result.refused] == ["a/train.py"]
