"""Variables of NCCL, of PyTorch's NCCL backend and of the allocator, wherever they are set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from traindoctor.registry import Rule, rule
from traindoctor.types import Finding, Kind, Severity
from traindoctor.variables import Variable, variables_of

EVERYWHERE = tuple(Kind)
DAY = 86_400
UNREAD = {
    "NCCL_TIMEOUT": "give init_process_group(timeout=...)",
    "NCCL_TIMEOUT_SEC": "give init_process_group(timeout=...)",
    "NCCL_TIMEOUT_MS": "give init_process_group(timeout=...)",
    "TORCH_NCCL_TIMEOUT": "give init_process_group(timeout=...)",
    "TORCH_NCCL_TIMEOUT_SEC": "give init_process_group(timeout=...)",
    "NCCL_HEARTBEAT_TIMEOUT_SEC": "the variable is TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "NCCL_ENABLE_MONITORING": "the variable is TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_DISTRIBUTED_TIMEOUT": "give init_process_group(timeout=...)",
    "TORCH_DIST_TIMEOUT": "give init_process_group(timeout=...)",
    "PYTORCH_NCCL_TIMEOUT": "give init_process_group(timeout=...)",
}
ALIASES = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
}
TORCH_HEADERS = (
    "PyTorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp and Utils.hpp (shipped in the wheel)"
)
_ABORTS = "Unsafe because an error that the program catches today may then end the process, or end it at another time."
NCCL_GUIDE = "NVIDIA NCCL user guide, Environment Variables"


def _is_on(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "t", "yes", "y", "on")


def _is_off(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("0", "false", "f", "no", "n", "off")


def _is_days(value: str | None) -> bool:
    return value is not None and value.isdigit() and int(value) > DAY


def _is_verbose(value: str | None) -> bool:
    return (value or "").upper() in ("INFO", "TRACE")


def _set(file: Any, *names: str) -> list[Variable]:
    return [variable for variable in variables_of(file) if variable.name in names]


def _switch(
    variables: tuple[str, ...],
    harmful: Callable[[str | None], bool],
    consequence: str,
    better: str | None,
    **about: Any,
) -> None:
    """Declare a rule about variables with a harmful value, and the value that replaces it."""

    @rule(*EVERYWHERE, **about)
    def check(file: Any, about: Rule) -> Iterator[Finding]:
        for variable in _set(file, *variables):
            if harmful(variable.value):
                message = f"{variable.name}={variable.value} {consequence}"
                fix = None if better is None else variable.change(better, f"set it to {better}", safe=False)
                yield about.at(file.path, variable.span, message, fix)


_switch(
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",),
    _is_days,
    "is more than a day: a hung job is never ended",
    "1800",
    code="NCC001",
    name="watchdog-timeout-in-days",
    severity=Severity.ERROR,
    summary="The NCCL watchdog's heartbeat time-out is longer than a day",
    why="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC counts seconds. With 12000000 a hung job holds its GPUs for 138 "
    "days before "
    "the monitor thread ends it.",
    effect="12000000 s / 86400 s = 138.9 days. PyTorch's own default is minutes.",
    source=TORCH_HEADERS,
    fix="unsafe",
    remedy="1800 gives half an hour, enough for slow start-ups. " + _ABORTS,
    bad="export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=12000000",
    good="export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800",
)


@rule(
    *EVERYWHERE,
    code="NCC002",
    name="variable-nobody-reads",
    severity=Severity.WARNING,
    summary="A time-out variable that neither NCCL nor PyTorch reads",
    why="NCCL_TIMEOUT and its relatives look right and do nothing: the time-out of a process group is the argument "
    "`timeout` of init_process_group (10 minutes by default for NCCL), so the job dies at a time nobody chose.",
    effect="None at all, which is the fault. Silent where the project's own code reads the variable.",
    source=f"{NCCL_GUIDE} (no such variable); {TORCH_HEADERS}",
    fix="unsafe",
    remedy="Pass timeout=datetime.timedelta(minutes=30) to init_process_group and remove the variable.",
    bad="export NCCL_TIMEOUT=7200",
    good="# in Python: init_process_group(timeout=timedelta(minutes=30))",
)
def variable_nobody_reads(file: Any, about: Rule) -> Iterator[Finding]:
    for variable in _set(file, *UNREAD):
        message = f"{variable.name} is read by neither NCCL nor PyTorch; {UNREAD[variable.name]}"
        fix = variable.remove(f"remove {variable.name}")
        yield about.at(file.path, variable.span, message, fix, unless=[f"reads:{variable.name}"])


@rule(
    *EVERYWHERE,
    code="NCC003",
    name="outdated-variable-name",
    severity=Severity.INFO,
    summary="An old name of a PyTorch NCCL variable",
    why="PyTorch 2.2 gave its variables the prefix TORCH_NCCL_. The old names still work, with a warning on "
    "each rank.",
    effect="A warning per rank at start; the old spelling may go away.",
    source=TORCH_HEADERS,
    fix="unsafe",
    remedy="Unsafe because the environment may hold the new name too, with another value.",
    bad="export NCCL_ASYNC_ERROR_HANDLING=1",
    good="export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
)
def outdated_name(file: Any, about: Rule) -> Iterator[Finding]:
    present = {variable.name for variable in variables_of(file)}
    for variable in _set(file, *ALIASES):
        new = ALIASES[variable.name]
        if new not in present:
            message = f"{variable.name} is the old name of {new}"
            fix = variable.rename(new, f"rename to {new}")
            yield about.at(file.path, variable.span, message, fix, unless=[f"reads:{variable.name}"])


@rule(
    *EVERYWHERE,
    code="NCC004",
    name="alias-loses-to-canonical-name",
    severity=Severity.WARNING,
    summary="Both names of one variable are set; the old one is ignored",
    why="PyTorch reads the names of a variable in reverse order and lets the canonical one win, so a value changed "
    "under the old name changes nothing.",
    effect="An error where the two values differ: the run does the opposite of what half of the lines say.",
    source="PyTorch, torch/csrc/distributed/c10d/Utils.hpp, getCvarString/getCvarInt/getCvarBool",
    fix="unsafe",
    remedy="Keep the TORCH_NCCL_ name only.",
    bad="export NCCL_BLOCKING_WAIT=0\nexport TORCH_NCCL_BLOCKING_WAIT=1",
    good="export TORCH_NCCL_BLOCKING_WAIT=0",
)
def alias_loses(file: Any, about: Rule) -> Iterator[Finding]:
    values = {variable.name: variable.value for variable in variables_of(file)}
    for variable in _set(file, *ALIASES, "PYTORCH_CUDA_ALLOC_CONF"):
        winner = ALIASES.get(variable.name, "PYTORCH_ALLOC_CONF")
        if winner not in values:
            continue
        differ = variable.value != values[winner]
        if winner == "PYTORCH_ALLOC_CONF" and not differ:
            continue  # both spellings with one value serve old and new versions
        message = f"{variable.name} loses to {winner}, which is set here too"
        message += f" and says {values[winner]!r}, not {variable.value!r}" if differ else ""
        severity = Severity.ERROR if differ else Severity.WARNING
        fix = variable.remove(f"remove {variable.name}")
        yield about.at(file.path, variable.span, message, fix, severity=severity)


_switch(
    ("TORCH_NCCL_ENABLE_MONITORING",),
    _is_off,
    "switches off the monitor that would end a hung job",
    "1",
    code="NCC005",
    name="watchdog-monitoring-off",
    severity=Severity.ERROR,
    summary="The monitor of the NCCL watchdog is switched off",
    why="TORCH_NCCL_ENABLE_MONITORING=0 removes the thread that ends a job whose watchdog is stuck; the heartbeat "
    "time-out then controls nothing.",
    effect="A hang inside CUDA or NCCL lasts until somebody looks.",
    source=TORCH_HEADERS,
    fix="unsafe",
    remedy=_ABORTS,
    bad="export TORCH_NCCL_ENABLE_MONITORING=0",
    good="export TORCH_NCCL_ENABLE_MONITORING=1",
)


_switch(
    ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
    _is_on,
    "stops the host at every wait; async error handling suffices",
    "0",
    code="NCC006",
    name="blocking-wait",
    severity=Severity.WARNING,
    summary="NCCL blocking wait is on",
    why="With blocking wait the host thread stands still in every wait() until the collective is done, instead of "
    "queueing more work; asynchronous error handling gives the same protection without it.",
    effect="No number was measured: the host can no longer run ahead of the GPU at each wait.",
    source="PyTorch docs, torch.distributed, TORCH_NCCL_BLOCKING_WAIT",
    fix="unsafe",
    remedy=_ABORTS,
    bad="export TORCH_NCCL_BLOCKING_WAIT=1",
    good="export TORCH_NCCL_BLOCKING_WAIT=0",
)


_switch(
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
    _is_off,
    "means: when one rank dies, the others hang",
    "1",
    code="NCC007",
    name="async-error-handling-off",
    severity=Severity.ERROR,
    summary="Asynchronous error handling of NCCL is off",
    why="Without it a rank whose peer died waits for ever in its collective.",
    effect="One dead rank becomes a hang of the whole job.",
    source="PyTorch docs, torch.distributed, TORCH_NCCL_ASYNC_ERROR_HANDLING",
    fix="unsafe",
    remedy=_ABORTS,
    bad="export TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
    good="export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
)


@rule(
    *EVERYWHERE,
    code="NCC008",
    name="debug-variable-left-on",
    severity=Severity.WARNING,
    summary="A debugging variable that slows every step is set",
    why="CUDA_LAUNCH_BLOCKING=1 makes every kernel launch wait; TORCH_DISTRIBUTED_DEBUG=DETAIL adds a collective to "
    "check each collective. Both belong on the command line of one debugging run, not in a script.",
    effect="No number was measured: no overlap of host and GPU; documented as costly by PyTorch.",
    source="CUDA C programming guide, CUDA_LAUNCH_BLOCKING; PyTorch docs, torch.distributed, TORCH_DISTRIBUTED_DEBUG",
    fix="unsafe",
    bad="export CUDA_LAUNCH_BLOCKING=1",
    good="# CUDA_LAUNCH_BLOCKING=1 only while debugging",
)
def debug_left_on(file: Any, about: Rule) -> Iterator[Finding]:
    for variable in _set(file, "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG"):
        detail = variable.name == "TORCH_DISTRIBUTED_DEBUG" and (variable.value or "").upper() == "DETAIL"
        if variable.deliberate:
            continue
        if detail or (variable.name == "CUDA_LAUNCH_BLOCKING" and _is_on(variable.value)):
            message = f"{variable.name}={variable.value} is for debugging and slows every step"
            value = "OFF" if detail else "0"
            yield about.at(
                file.path, variable.span, message, variable.change(value, f"set it to {value}", safe=False)
            )


_switch(
    ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_DISABLE"),
    _is_on,
    "switches a fast transport off on every machine that runs this",
    None,
    code="NCC009",
    name="transport-switched-off",
    severity=Severity.WARNING,
    summary="A fast NCCL transport is switched off",
    why="NCCL_P2P_DISABLE, NCCL_IB_DISABLE and NCCL_SHM_DISABLE are work-arounds for one broken machine. In "
    "a script they "
    "follow the code to machines whose NVLink or InfiniBand works.",
    effect="Traffic takes the next slower path (PCIe through the host, or TCP); NCCL's guide names them as "
    "debugging aids.",
    source=NCCL_GUIDE,
    remedy="Set it in the environment of the machine that needs it.",
    bad="export NCCL_P2P_DISABLE=1",
    good="# per machine, outside the repository",
)


_switch(
    ("NCCL_DEBUG",),
    _is_verbose,
    "fills the log; WARN prints errors",
    "WARN",
    code="NCC010",
    name="verbose-nccl-log",
    severity=Severity.INFO,
    summary="NCCL_DEBUG=INFO or TRACE is left on",
    why="INFO prints the topology and every communicator on every rank, TRACE every call; the log of a real failure "
    "drowns in it. NCCL_DEBUG=WARN prints errors only.",
    effect="No number was measured: log volume grows with ranks and, for TRACE, with steps.",
    source=NCCL_GUIDE,
    fix="unsafe",
    bad="export NCCL_DEBUG=INFO",
    good="export NCCL_DEBUG=WARN",
)
