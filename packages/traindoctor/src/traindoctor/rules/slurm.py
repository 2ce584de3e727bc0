"""SLURM scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from traindoctor.programs import EVALUATES
from traindoctor.registry import Rule, rule
from traindoctor.rules.launch import _option, script_of
from traindoctor.shell_file import ShellFile
from traindoctor.types import Finding, Kind, Severity

SLURM = "SLURM documentation, sbatch"


_NO_TRAINING = re.compile(f"{EVALUATES.pattern}|preproc|prepar", re.IGNORECASE)
_LONG = 120
"""Minutes from which a lost job costs more than a signal handler."""


def _minutes(value: str) -> float:
    """The minutes of `90`, `30:00`, `12:00:00`, `1-12` and `1-12:00:00`; 0 for anything else (templates say HOURS)."""
    days, dash, rest = value.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]):
        return 0
    hours = bool(dash) or len(parts) > 2
    units = (60, 1, 1 / 60) if hours else (1, 1 / 60)
    return sum(int(part) * unit for part, unit in zip(parts, units, strict=False)) + int(days or 0) * 1440


def _nodes(file: ShellFile) -> int:
    value = file.sbatch_value("--nodes", "-N") or "1"
    return int(value) if value.isdigit() else 1


@rule(
    Kind.SHELL,
    code="SLM001",
    name="no-warning-before-the-time-limit",
    severity=Severity.INFO,
    summary="A training job with a time limit asks for no signal before it",
    why="At the limit SLURM sends SIGTERM and, 30 seconds later by default, SIGKILL. --signal=B:USR1@300 "
    "gives time for a "
    "last checkpoint.",
    effect="Work since the last checkpoint is lost at every time limit.",
    source=f"{SLURM}, --signal, and KillWait in slurm.conf",
    remedy="#SBATCH --signal=B:USR1@300 and a handler, or --requeue with frequent checkpoints.",
    bad="#SBATCH --time=24:00:00",
    good="#SBATCH --time=24:00:00\n#SBATCH --signal=B:USR1@300",
)
def no_signal(file: ShellFile, about: Rule) -> Iterator[Finding]:
    named = file.path.rsplit("/", 1)[-1]
    if EVALUATES.search(named) or not any(
        c.is_training() and not _NO_TRAINING.search(script_of(c)) for c in file.commands
    ):
        return
    given = {option for option, _, _, _ in file.sbatch}
    for option, value, start, end in file.sbatch:
        is_time = "$" in value or _minutes(value) >= _LONG
        if option in ("--time", "-t") and is_time and not given & {"--signal", "--requeue"}:
            yield about.at(
                file.path, file.span(start, end), f"the job is killed after {value} without a signal to save"
            )
            return


@rule(
    Kind.SHELL,
    code="SLM002",
    name="more-workers-than-cpus",
    severity=Severity.WARNING,
    summary="More loader workers than CPUs for the task",
    why="SLURM confines a task to --cpus-per-task CPUs; additional workers take turns on them.",
    effect="torch warns; processes compete for the same cores.",
    source=f"{SLURM}, --cpus-per-task; torch/utils/data/dataloader.py",
    remedy="num_workers at most cpus-per-task divided by the processes of the task.",
    bad="#SBATCH --cpus-per-task=4\nsrun python train.py data.num_workers=16",
    good="#SBATCH --cpus-per-task=16\nsrun python train.py data.num_workers=16",
)
def more_workers(file: ShellFile, about: Rule) -> Iterator[Finding]:
    cpus = file.sbatch_value("--cpus-per-task", "-c")
    if not cpus or not cpus.isdigit():
        return
    for command in file.commands:
        for index, word in enumerate(command.words):
            match = re.fullmatch(r"(?:--|[\w.]*\.)?(?:dataloader_)?num[_-]workers(?:=(\d+))?", word.plain)
            following = command.words[index + 1].plain if index + 1 < len(command.words) else ""
            given = match[1] or (following if following.isdigit() else None) if match else None
            if given and int(given) > int(cpus) and command.is_training():
                yield about.at(
                    file.path, file.word_span(word), f"{given} workers, but the task has {cpus} CPUs"
                )


@rule(
    Kind.SHELL,
    code="SLM003",
    name="launcher-on-first-node-only",
    severity=Severity.ERROR,
    summary="Several nodes are reserved, but the launcher runs on the first one only",
    why="The batch script itself runs on one node. Without srun, torchrun waits there for the other nodes, "
    "or trains on one "
    "while the rest stand idle.",
    effect="A hang at rendezvous, or idle nodes.",
    source=f"{SLURM} and srun; PyTorch docs, torchrun multi-node",
    remedy="srun torchrun --nnodes=$SLURM_NNODES ...",
    bad="#SBATCH --nodes=4\ntorchrun --nproc_per_node=8 train.py",
    good="#SBATCH --nodes=4\nsrun torchrun --nnodes=4 --nproc_per_node=8 train.py",
)
def first_node_only(file: ShellFile, about: Rule) -> Iterator[Finding]:
    if _nodes(file) < 2 or any(
        c.name in ("srun", "pdsh", "clush", "mpirun", "mpiexec", "ssh") for c in file.commands
    ):
        return
    for command in file.commands:
        if command.name in ("torchrun", "accelerate") or "torch.distributed.run" in command.arguments:
            message = (
                f"{_nodes(file)} nodes are reserved, but {command.name} starts on the first only; add srun"
            )
            yield about.at(file.path, file.command_span(command), message)


@rule(
    Kind.SHELL,
    code="SLM004",
    name="processes-multiplied",
    severity=Severity.ERROR,
    summary="srun starts several tasks per node and each starts a torchrun with several processes",
    why="--ntasks-per-node=8 and --nproc_per_node=8 make 64 processes on 8 GPUs.",
    effect="Out of memory or a port collision at start.",
    source=f"{SLURM}, --ntasks-per-node; PyTorch docs, torchrun",
    remedy="--ntasks-per-node=1 with torchrun, or one task per GPU without torchrun.",
    bad="#SBATCH --ntasks-per-node=8\nsrun torchrun --nproc_per_node=8 train.py",
    good="#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc_per_node=8 train.py",
)
def multiplied(file: ShellFile, about: Rule) -> Iterator[Finding]:
    tasks = file.sbatch_value("--ntasks-per-node") or "1"
    if not tasks.isdigit() or int(tasks) < 2:
        return
    for command in file.commands:
        if command.name != "srun" or "torchrun" not in command.arguments:
            continue
        wanted = _option(command, "--nproc_per_node", "--nproc-per-node")
        own = _option(command, "--ntasks-per-node", "--ntasks", "-n")
        if own is None and wanted and (wanted in ("gpu", "auto") or (wanted.isdigit() and int(wanted) > 1)):
            message = f"{tasks} tasks per node, and each starts {wanted} processes"
            yield about.at(file.path, file.command_span(command), message)


@rule(
    Kind.SHELL,
    code="SLM005",
    name="master-is-localhost",
    severity=Severity.ERROR,
    summary="MASTER_ADDR is localhost, but the job has several nodes",
    why="Every node looks for the master on itself; the ranks never meet.",
    effect="A hang at rendezvous until the time-out.",
    source="PyTorch docs, environment-variable initialisation",
    remedy='MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    bad="#SBATCH --nodes=2\nexport MASTER_ADDR=localhost",
    good='export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
)
def localhost_master(file: ShellFile, about: Rule) -> Iterator[Finding]:
    several = _nodes(file) > 1
    for command in file.commands:
        count = _option(command, "--nnodes", "--num_machines")
        several = several or bool(count and count.isdigit() and int(count) > 1)
    if not several:
        return
    for assignment, command in file.assignments():
        if (
            assignment.name == "MASTER_ADDR"
            and assignment.value.literal in ("localhost", "127.0.0.1")
            and not command.guards
        ):
            span = file.span(assignment.start, assignment.value.end)
            yield about.at(
                file.path, span, "every node looks for the master on itself; use the first node's name"
            )


@rule(
    Kind.SHELL,
    code="SLM006",
    name="directive-behind-a-command",
    severity=Severity.ERROR,
    summary="An #SBATCH line after the first command is ignored",
    why="sbatch stops reading directives at the first line that is not a comment; later ones are plain comments.",
    effect="The job runs with other resources than the script says.",
    source=SLURM,
    remedy="Move all #SBATCH lines to the top.",
    bad="#!/bin/bash\nset -e\n#SBATCH --gres=gpu:4",
    good="#!/bin/bash\n#SBATCH --gres=gpu:4\nset -e",
)
def late_directive(file: ShellFile, about: Rule) -> Iterator[Finding]:
    for option, _, start, end in file.late_sbatch:
        yield about.at(
            file.path,
            file.span(start, end),
            f"{option} comes after the first command and is ignored by sbatch",
        )


@rule(
    Kind.SHELL,
    code="SLM007",
    name="job-ends-before-its-processes",
    severity=Severity.ERROR,
    summary="Training runs in the background and the script does not wait",
    why="When the batch script ends, SLURM ends the job and kills everything it started.",
    effect="The run is killed at once.",
    source=SLURM,
    remedy="`wait` at the end.",
    bad="python train.py &",
    good="python train.py &\nwait",
)
def no_wait(file: ShellFile, about: Rule) -> Iterator[Finding]:
    if not file.sbatch or any(command.name == "wait" for command in file.commands):
        return
    background = [c for c in file.commands if c.is_training() and c.after == "&"]
    if background and file.commands[-1].start <= background[-1].start:
        yield about.at(
            file.path, file.command_span(background[-1]), "the job ends here and kills this process; add wait"
        )


@rule(
    Kind.SHELL,
    code="SLM008",
    name="output-file-overwritten",
    severity=Severity.INFO,
    summary="The job's output has a fixed name",
    why="The next job with this script overwrites the log of the last one.",
    effect="The log of a failed run is gone when it is needed.",
    source=f"{SLURM}, --output (filename pattern)",
    remedy="%j in the name (or --open-mode=append).",
    bad="#SBATCH --output=train.log",
    good="#SBATCH --output=train_%j.log",
)
def fixed_output(file: ShellFile, about: Rule) -> Iterator[Finding]:
    appends = file.sbatch_value("--open-mode") == "append"
    for option, value, start, end in file.sbatch:
        if (
            option in ("--output", "-o")
            and value
            and "%" not in value
            and value != "/dev/null"
            and not appends
        ):
            yield about.at(
                file.path,
                file.span(start, end),
                f"{value} is overwritten by the next job; put %j into the name",
            )
