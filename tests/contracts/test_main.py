"""The way in and out of the command line: no traceback for what the user or the disk did."""

import errno
import inspect
import os
import py_compile
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from traindoctor.pages import rule_page
from traindoctor.registry import get_rule
from typer.testing import CliRunner

from mmldlm.cli import data, main
from mmldlm.cli.options import option, takes
from tests.stores import write_store

LOADING = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "runwatch.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
import mmldlm.cli.main
"""


def test_ctrl_c_while_the_program_is_loaded_is_one_line():
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "mmldlm: interrupted; run the same command to go on\n"


SWALLOWING = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # as libraries do that try what they can import
                raise ImportError("typer")
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("mmldlm", run_name="__main__")
"""


def test_ctrl_c_inside_an_import_that_swallows_it_is_one_line_too():
    done = subprocess.run([sys.executable, "-c", SWALLOWING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "mmldlm: interrupted; run the same command to go on\n")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EFBIG, "no space left"),
        (errno.EROFS, "you may write to"),
        (errno.ENAMETOOLONG, "choose another"),
    ],
)
def test_what_the_disk_refuses_is_one_line(number, words, monkeypatch, capsys):
    def fail():
        raise OSError(number, "why", "some/file")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as leaving:
        main.main()
    assert leaving.value.code == 2
    told = capsys.readouterr().err
    assert "some/file" in told
    assert words in told


def test_a_narrow_terminal_cuts_no_number_of_a_store_off(tmp_path, monkeypatch, capsys):
    write_store(tmp_path / "s")
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda console: True))
    monkeypatch.setenv("COLUMNS", "30")
    data.inspect(store=tmp_path / "s")
    assert "…" not in capsys.readouterr().out


def test_brackets_in_the_name_of_a_store_are_shown(tmp_path, capsys):
    write_store(tmp_path / "[v2]")
    data.inspect(store=tmp_path / "[v2]")
    assert "[v2]" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize(("kept", "may_write"), [(True, False), (False, True), (False, False)])
def test_compiled_modules_are_kept_where_nobody_else_does(tmp_path, kept, may_write):
    """A second start finds what the first one compiled, although Python was told not to write it."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if kept:
        py_compile.compile(str(package / "__init__.py"))
    code = "from mmldlm.__main__ import keep_bytecode; keep_bytecode(); import torch; print(torch.__cached__)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PYTHONPATH": f"{package.parent}{os.pathsep}{os.pathsep.join(sys.path)}"}
    environment |= {
        "XDG_CACHE_HOME": str(tmp_path),
        **({} if may_write else {"PYTHONDONTWRITEBYTECODE": "1"}),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    file = Path(done.stdout.strip())
    assert file.is_file()
    assert file.is_relative_to(tmp_path / "mmldlm" / "python") == (not kept and not may_write)


def every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from every_command(child, (*path, name))
    if not hasattr(command, "commands") and not command.hidden:
        yield " ".join(path), command


COMMANDS = dict(every_command(typer.main.get_command(main.app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_a_value_is_without_types_of_python(name):
    """One word for one thing in all commands: RUN, STORE, FILE, N."""
    shown = CliRunner().invoke(main.app, [*name.split(), "--help"], env={"COLUMNS": "80"}).output
    assert not re.search(r"<(str|int|float|path|list\W)", shown, re.IGNORECASE), shown
    assert max(map(len, shown.splitlines())) <= 80
    for param in COMMANDS[name].params:
        expected = {
            "run": "RUN",
            "settings": "SETTING",
            "store": "STORE",
            "recipe": "RECIPE",
            "split": "SPLIT",
        }
        if param.name in expected and not name.startswith(("monitor", "doctor")):
            assert param.metavar == expected[param.name], param.name


def test_options_say_their_own_names():
    """Typer 0.27 calls those that do not as help calls their value, --RECIPE."""
    rows = {
        "recipe": option(str, ..., ""),
        "max_tokens": option(int | None, None, ""),
        "dry_run": option(bool, False, ""),
    }

    @takes(rows)
    def command(words):
        """Nothing."""

    decls = [
        get_args(part.annotation)[1].param_decls for part in inspect.signature(command).parameters.values()
    ]
    assert decls == [("--recipe",), ("--max-tokens",), ()]


def test_help_of_prepare_is_in_groups():
    shown = CliRunner().invoke(main.app, ["prepare", "--help"]).output
    heads = [line for line in shown.splitlines() if re.fullmatch(r"[A-Z][A-Za-z -]*:", line)]
    assert heads == ["Arguments:", "Options:", "Text:", "Latents:", "Held-out text:", "How it runs:"]


def test_the_doctor_names_our_commands():
    shown = CliRunner().invoke(main.app, ["doctor", "rule", "DAT001"]).output
    assert "made with `mmldlm doctor fix --apply --unsafe`" in shown
    failed = CliRunner().invoke(main.app, ["doctor", "rule", "XYZ9"])
    assert "'mmldlm doctor rule' without a code lists all" in str(failed.exception)
    assert "made with `traindoctor fix" in rule_page(get_rule("DAT001"))  # elsewhere in the same process
