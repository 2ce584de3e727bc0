"""Launch scripts: exit codes, ports, arithmetic, here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from traindoctor.registry import Rule, rule
from traindoctor.shell_file import Command, ShellFile
from traindoctor.types import Finding, Fix, Kind, Severity, TextEdit

BASH = "GNU Bash manual"


def _insert_after_header(file: ShellFile, line: str) -> TextEdit:
    """An insertion behind the shebang, comments and SLURM directives at the top."""
    number = 1
    while number <= len(file.source.starts) and (
        file.source.line(number).lstrip().startswith("#") or not file.source.line(number).strip()
    ):
        number += 1
    at = file.source.starts[number - 1] if number <= len(file.source.starts) else len(file.source.text)
    first = file.commands[0].start if file.commands else len(file.source.text)
    at = min(at, file.source.starts[file.source.place(first)[0] - 1])
    return TextEdit(at, at, line + file.source.newline)


@rule(
    Kind.SHELL,
    code="SHL001",
    name="exit-code-lost-in-a-pipe",
    severity=Severity.ERROR,
    summary="Training is piped into tee and its exit code is lost",
    why="A pipeline has the exit code of its last command. `train | tee log` succeeds whenever tee does, so "
    "the scheduler, "
    "`set -e` and every `&&` after it believe that a crashed run has finished.",
    effect="Checked with bash 5.2: `false | tee x` exits with 0, with pipefail it exits with 1.",
    source=f"{BASH}, Pipelines and the set builtin (pipefail)",
    fix="unsafe",
    remedy="`set -o pipefail` at the top, or ${PIPESTATUS[0]}. Unsafe because the script then ends with another exit "
    "code, and other pipelines change too.",
    bad="torchrun train.py 2>&1 | tee train.log",
    good="set -o pipefail\ntorchrun train.py 2>&1 | tee train.log",
)
def lost_exit_code(file: ShellFile, about: Rule) -> Iterator[Finding]:
    for pipeline in file.pipelines():
        first, last = pipeline[0], pipeline[-1]
        if len(pipeline) < 2 or last.name not in ("tee", "ts", "grep") or not first.is_training():
            continue
        state = file.option_state(first.start)
        rest = file.source.text[last.end :]
        if "pipefail" in state or re.search(r"PIPESTATUS|pipestatus", rest[:400]):
            continue
        bash = "bash" in file.shebang or "zsh" in file.shebang or not file.shebang
        fix = None
        if bash and not first.guards:
            edit = _insert_after_header(file, "set -o pipefail")
            fix = Fix("set -o pipefail", False, text_edits=(edit,))
        message = f"the exit code of {first.name} is lost behind `| {last.name}`: a crash looks like success"
        yield about.at(file.path, file.span(first.start, last.end), message, fix)


@rule(
    Kind.SHELL,
    code="SHL002",
    name="script-goes-on-after-failure",
    severity=Severity.INFO,
    summary="Different programs run one after the other, and the script continues after a failure",
    why="Without `set -e` or `&&` the second program starts although the first one crashed, often on "
    "half-written data.",
    effect="No number was measured: the failure is noticed at the end, or never.",
    source=f"{BASH}, the set builtin (-e)",
    remedy="`set -euo pipefail` at the top.",
    bad="python prepare.py\npython train.py",
    good="set -euo pipefail\npython prepare.py\npython train.py",
)
def goes_on(file: ShellFile, about: Rule) -> Iterator[Finding]:
    programs = [c for c in file.commands if c.is_training() and not c.guards and c.before not in ("|", "|&")]
    for first, second in pairwise(programs):
        handled = first.after in ("||", "&&", "&", "|", "|&") or second.before in ("&&", "||")
        handled = handled or second.after == "&" or script_of(first) == script_of(second)
        between = file.source.text[first.end : second.start]
        if not handled and "e" not in file.option_state(first.start) and "$?" not in between:
            message = f"{second.name} starts even if {first.name} on line {file.source.place(first.start)[0]} failed"
            yield about.at(
                file.path,
                file.span(second.start, second.words[0].end if second.words else second.end),
                message,
            )
            return


def script_of(command: Command) -> str:
    """The program that a command starts; the same one again, with other arguments, needs nothing of the first."""
    words = command.arguments
    scripts = [word for word in words if word.endswith(".py")]
    return scripts[0] if scripts else words[words.index("-m") + 1] if "-m" in words[:-1] else ""


_PORT = re.compile(r"--(?:master|main)[_-](?:process[_-])?port")


@rule(
    Kind.SHELL,
    code="SHL003",
    name="fixed-master-port",
    severity=Severity.WARNING,
    summary="MASTER_PORT is a fixed number",
    why="Two jobs on one machine meet on the same port: the second dies with 'Address already in use' or "
    "joins the first.",
    effect="No number was measured: any second job on the node fails.",
    source="PyTorch docs, torchrun (rdzv_endpoint, --standalone)",
    fix="unsafe",
    remedy="`${MASTER_PORT:-29500}` lets the outside choose; `--standalone` picks a free port on one node. "
    "Unsafe because "
    "a MASTER_PORT in the environment then counts, also for a second job of the same script.",
    bad="export MASTER_PORT=29500",
    good='export MASTER_PORT="${MASTER_PORT:-29500}"',
)
def fixed_port(file: ShellFile, about: Rule) -> Iterator[Finding]:
    for assignment, command in file.assignments():
        value = assignment.value.literal
        tested = any("MASTER_PORT" in guard for guard in command.guards)
        if assignment.name == "MASTER_PORT" and value and value.isdigit() and not tested and assignment.alone:
            edit = TextEdit(assignment.value.start, assignment.value.end, f'"${{MASTER_PORT:-{value}}}"')
            fix: Fix | None = Fix("let the outside choose the port", False, text_edits=(edit,))
            span = file.span(assignment.start, assignment.value.end)
            yield about.at(
                file.path, span, f"MASTER_PORT={value} is fixed; two jobs on one machine collide", fix
            )
    ports = sum(1 for command in file.commands for word in command.words if _PORT.match(word.plain))
    alone = ports == 1 and not any(assignment.name == "MASTER_PORT" for assignment, _ in file.assignments())
    for command in file.commands:
        for index, word in enumerate(command.words):
            name, equals, value = word.plain.partition("=")
            if not _PORT.fullmatch(name):
                continue
            target = word if equals else command.words[index + 1] if index + 1 < len(command.words) else None
            text = value if equals else target.plain if target else ""
            if target is not None and text.isdigit() and text != "0":
                start = target.end - len(text) if equals else target.start
                fix = None
                # With a second port or MASTER_PORT in the script, one variable cannot stand for both.
                if alone and file.source.text[start : target.end] == text:
                    edit = TextEdit(start, target.end, f'"${{MASTER_PORT:-{text}}}"')
                    fix = Fix("let the outside choose the port", False, text_edits=(edit,))
                yield about.at(
                    file.path,
                    file.word_span(target),
                    f"port {text} is fixed; two jobs on one machine collide",
                    fix,
                )


@rule(
    Kind.SHELL,
    code="SHL006",
    name="more-processes-than-gpus",
    severity=Severity.ERROR,
    summary="More processes than visible GPUs",
    why="CUDA_VISIBLE_DEVICES lists fewer GPUs than --nproc_per_node starts; the processes above fail with "
    "'invalid device "
    "ordinal' or share a GPU.",
    effect="A crash at start, or ranks that share a GPU.",
    source="PyTorch docs, torchrun",
    remedy="--nproc_per_node=gpu counts the visible ones.",
    bad="CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 train.py",
    good="CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=gpu train.py",
)
def too_many_processes(file: ShellFile, about: Rule) -> Iterator[Finding]:
    exported: int | None = None
    for command in file.commands:
        visible = exported
        for assignment in command.assignments:
            if assignment.name == "CUDA_VISIBLE_DEVICES":
                value = assignment.value.literal
                count = len(value.split(",")) if value and re.fullmatch(r"\d+(,\d+)*", value) else None
                visible = count
                if not command.words or assignment.exported:
                    exported = count if not command.guards else None
        wanted = _option(command, "--nproc_per_node", "--nproc-per-node", "--num_processes", "--num_gpus")
        single_node = _option(command, "--nnodes", "--num_machines") in (None, "1")
        if (
            visible
            and wanted
            and wanted.isdigit()
            and int(wanted) > visible
            and single_node
            and command.is_training()
        ):
            message = f"{wanted} processes, but CUDA_VISIBLE_DEVICES shows {visible} GPU{'s' if visible > 1 else ''}"
            yield about.at(file.path, file.command_span(command), message)


def _option(command: Command, *names: str) -> str | None:
    arguments = command.arguments
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else arguments[index + 1] if index + 1 < len(arguments) else None
    return None


@rule(
    Kind.SHELL,
    code="SHL007",
    name="deprecated-launcher",
    severity=Severity.WARNING,
    summary="python -m torch.distributed.launch",
    why="Deprecated in favour of torchrun, which restarts failed workers and collects their errors.",
    effect="A FutureWarning on every start.",
    source="PyTorch docs, torch.distributed.launch (deprecated)",
    fix="safe",
    remedy="torchrun is the same as `python -m torch.distributed.run`. The fix is offered where --use_env is given; "
    "without it the script is passed --local-rank and must read LOCAL_RANK first.",
    bad="python -m torch.distributed.launch --use_env --nproc_per_node=8 train.py",
    good="python -m torch.distributed.run --nproc_per_node=8 train.py",
)
def deprecated_launcher(file: ShellFile, about: Rule) -> Iterator[Finding]:
    for command in file.commands:
        words = command.words
        for index, word in enumerate(words):
            if word.raw == "torch.distributed.launch" and index >= 2 and words[index - 1].raw == "-m":
                environment = [w for w in words if w.raw in ("--use_env", "--use-env")]
                fix = None
                if environment and index == 2:
                    flag = environment[0]
                    text = file.source.text
                    before = flag.start - 1 if text[flag.start - 1] == " " else flag.start
                    # The same interpreter as before: a torchrun on the path may belong to another one.
                    edits = (
                        TextEdit(word.start, word.end, "torch.distributed.run"),
                        TextEdit(before, flag.end, ""),
                    )
                    fix = Fix("call torch.distributed.run", True, text_edits=edits)
                message = "torch.distributed.launch is deprecated; torchrun replaces it"
                yield about.at(file.path, file.span(words[0].start, word.end), message, fix)


@rule(
    Kind.SHELL,
    code="SHL009",
    name="variable-in-quoted-here-document",
    severity=Severity.ERROR,
    summary="A shell variable inside a here-document that is not expanded",
    why="With a quoted delimiter (<< 'EOF') the shell passes the text as it is: Python sees the letters "
    "${LOG}, not the path.",
    effect="Checked with bash 5.2: the text arrives unexpanded.",
    source=f"{BASH}, Here Documents",
    remedy="Pass the value as an argument or in the environment: LOG=\"$LOG\" python3 - << 'EOF' ... "
    "os.environ['LOG'].",
    bad="python3 << 'EOF'\nopen(\"${LOG}\")\nEOF",
    good="LOG=\"$LOG\" python3 << 'EOF'\nimport os\nopen(os.environ['LOG'])\nEOF",
)
def quoted_here_document(file: ShellFile, about: Rule) -> Iterator[Finding]:
    assigned = {assignment.name for assignment, _ in file.assignments()}
    for command in file.commands:
        if not re.fullmatch(r"python[\d.]*", command.name):
            continue
        for document in command.documents:
            if not document.quoted:
                continue
            body = file.source.text[document.start : document.end]
            for match in re.finditer(r"[\"']\$\{(\w+)\}", body):
                if match[1] in assigned:
                    start = document.start + match.start() + 1
                    message = f"${{{match[1]}}} is not expanded: the here-document's delimiter is quoted"
                    yield about.at(file.path, file.span(start, start + len(match[1]) + 3), message)
                    break


@rule(
    Kind.SHELL,
    code="SHL005",
    name="exponent-given-to-bc",
    severity=Severity.ERROR,
    summary="bc is given a number such as 5e-5",
    why="bc does not know exponents: it reads `5e-5` as a name and prints a syntax error, and the variable "
    "stays empty.",
    effect="POSIX bc's grammar has no exponents; GNU bc prints '(standard_in) 1: syntax error'.",
    source="POSIX bc, lexical conventions",
    remedy='LR=$(python -c "print($BASE_LR * $SCALE)").',
    bad='LR=$(echo "5e-5 * 2" | bc -l)',
    good='LR=$(python -c "print(5e-5 * 2)")',
)
def exponent_for_bc(file: ShellFile, about: Rule) -> Iterator[Finding]:
    exponent = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]?\d+(?![\w.])")
    constants = {name: value for name, value in file.constants().items() if exponent.fullmatch(value.strip())}
    for start, end, command_text in _bc_inputs(file):
        literal = exponent.search(command_text)
        used = next((n for n in constants if re.search(rf"\$\{{?{n}\b", command_text)), None)
        if literal or used:
            what = literal[0] if literal else f"${used} ({constants[used or '']})"
            yield about.at(file.path, file.span(start, end), f"bc cannot read {what}: it knows no exponents")


def _bc_inputs(file: ShellFile) -> Iterator[tuple[int, int, str]]:
    """Text that reaches bc: `echo ... | bc` and `bc <<< ...`, at the top or inside `$(...)`."""
    for pipeline in file.pipelines():
        last = pipeline[-1]
        if last.name == "bc":
            given = " ".join(w.raw for c in pipeline[:-1] for w in c.words[1:])
            given += " ".join(w.raw for operator, w in last.redirections if operator == "<<<")
            yield pipeline[0].start, last.end, given
    for command in file.commands:
        for word in [*command.words, *(a.value for a in command.assignments)]:
            for match in re.finditer(
                r"\$\(\s*(?:echo|printf)\s+((?:[^()|]|\$\(\([^)]*\)\))*)\|\s*bc\b[^)]*\)", word.raw
            ):
                if not word.raw.startswith("'"):
                    yield word.start + match.start(), word.start + match.end(), match[1]
            for match in re.finditer(r"\$\(\s*bc\b[^)]*<<<\s*([^)]*)\)", word.raw):
                if not word.raw.startswith("'"):
                    yield word.start + match.start(), word.start + match.end(), match[1]
