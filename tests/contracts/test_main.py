"""The way in and out of the command line: no traceback for what the user or the disk did."""

import errno
import subprocess
import sys

import pytest

from mmldlm.cli import main

LOADING = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "mmldlm.cli.monitor":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
import mmldlm.cli.main
"""


def test_ctrl_c_while_the_program_is_loaded_is_one_line():
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "mmldlm: interrupted; run the same command to go on\n"


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
