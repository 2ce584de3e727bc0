"""The shell reader: positions are exact and nothing quoted, commented or embedded is taken for code."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from traindoctor.shell_file import ShellError, ShellFile
from traindoctor.source import read_source
from traindoctor.types import Kind


def _read(text: str) -> ShellFile:
    return ShellFile(read_source("x.sh", Kind.SHELL, text.encode()))


def test_words_lie_where_they_say() -> None:
    text = """a=1 b="x y" cmd 'q $z' "$(inner "deep" | more)" ${v:-"d e"} $((1 + 2)) `old` \\
  next # comment
"""
    for command in _read(text).commands:
        for word in command.words:
            assert text[word.start : word.end] == word.raw


def test_structures_are_followed() -> None:
    script = _read(
        """#!/bin/bash
set -euo pipefail
if [ -z "${PORT:-}" ]; then
  PORT=1
elif [[ $x == "a" && ( $y > 3 ) ]]; then PORT=2; fi
for f in *.py; do echo "$f"; done
for ((i=0; i<3; i++)); do echo $i; done
case "$1" in
  a|b) echo ab ;;
  *) echo other | tee log ;;
esac
run() { local k=v; python train.py 2>&1 | tee log; }
while read -r line; do echo "$line"; done < <(sort x)
arr=(one two "three four")
cat <<-'END' > out
	python train.py | tee log
	END
python - <<PY
print("$x")
PY
"""
    )
    names = [command.name for command in script.commands if command.words]
    assert names.count("echo") == 5
    assert names.count("tee") == 2
    assert names.count("cat") == 1
    port = [command for assignment, command in script.assignments() if assignment.name == "PORT"]
    assert all("PORT" in port[0].guards[-1] for _ in port)
    pipelines = [[c.name for c in p] for p in script.pipelines() if len(p) > 1]
    assert ["python", "tee"] in pipelines
    assert "pipefail" in script.option_state(len(script.source.text))


def test_options_can_be_switched_off_again() -> None:
    script = _read("set -eo pipefail\nset +e\npython a.py\n")
    assert script.option_state(len(script.source.text)) == {"pipefail"}


@given(st.text(alphabet="ab $(){}[]|&;<>'\"`\\\n#=-1", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        script = _read(text)
    except ShellError:
        return
    for command in script.commands:
        for word in command.words:
            assert re.sub(r"\\\n", "", script.source.text[word.start : word.end]) == re.sub(
                r"\\\n", "", word.raw
            )
