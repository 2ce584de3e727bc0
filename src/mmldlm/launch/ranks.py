"""Start the ranks of this node with torchrun's agent, and report which one failed first and why.

What is not stated is taken from the machine and from SLURM: the number of ranks, the nodes, the meeting point.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.reports import counted

PORT = 29500
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
ORDERLY = {
    75: "stopped in order; the same command resumes the run",
    130: "interrupted; the same command resumes",
}
"""Exit codes of ranks that saved their work, and what they mean."""
_GRACE = "120"
"""Seconds that ranks have to save after a signal, where this PyTorch reads the variable."""


@dataclass
class LaunchPlan:
    """What torchrun's agent needs to start the ranks of one node."""

    nnodes: tuple[int, int] = (1, 1)
    """Fewest and most nodes."""
    nproc_per_node: int = 1
    rdzv_endpoint: str = "localhost:0"
    """0: a free port."""
    rdzv_id: str = "mmldlm"
    node_rank: int | None = None
    """None: nodes are numbered as they arrive."""
    max_restarts: int = 0
    log_dir: Path = Path("train_logs")
    sources: dict[str, str] = field(default_factory=dict)
    """Where each value that was not stated comes from."""

    def describe(self) -> str:
        low, high = self.nnodes
        nodes = counted(high, "node") if low == high else f"{low} to {high} nodes"
        taken = "".join(f"; {name}: {where}" for name, where in self.sources.items())
        free = self.rdzv_endpoint == "localhost:0"
        meeting = "a free port of this machine" if free else self.rdzv_endpoint
        if self.nnodes != (1, 1) and not _resolves(self.rdzv_endpoint):
            meeting += " (a host that this machine does not know; is its name right?)"
        ranks = counted(self.nproc_per_node, "rank")
        return f"launch: {nodes} x {ranks}, meeting at {meeting}, logs in {self.log_dir}{taken}"


def _resolves(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        return bool(socket.getaddrinfo(host.strip("[]"), int(port)))
    except (OSError, UnicodeError):
        return False


def plan_launch(
    environment: Mapping[str, str],
    *,
    nnodes: str | None = None,
    nproc_per_node: int | None = None,
    rdzv_endpoint: str | None = None,
    node_rank: int | None = None,
    max_restarts: int = 0,
    log_dir: Path = Path("train_logs"),
) -> LaunchPlan:
    """Fill in what was not stated; `nnodes` is a number or `MIN:MAX`."""
    plan = LaunchPlan(node_rank=node_rank, max_restarts=max_restarts, log_dir=log_dir)
    slurm = "SLURM_STEP_NODELIST" in environment
    if nnodes is not None:
        plan.nnodes = parse_nodes(nnodes)
    elif slurm:
        plan.nnodes = (_slurm_nodes(environment),) * 2
        plan.sources["nodes"] = "SLURM_STEP_NUM_NODES"
    plan.nproc_per_node = nproc_per_node or _count_ranks(plan)
    if slurm:
        plan.rdzv_id = environment.get("SLURM_JOB_ID", plan.rdzv_id)
    if plan.nnodes != (1, 1):
        plan.rdzv_endpoint = _endpoint(rdzv_endpoint, environment, plan, slurm)
    elif rdzv_endpoint is not None:
        plan.rdzv_endpoint = check_endpoint(rdzv_endpoint)
    if node_rank is not None and plan.nnodes[0] != plan.nnodes[1]:
        raise UserError(
            f"node rank {node_rank}: nodes {nnodes} may come and go and are numbered as they arrive; leave it out, or "
            "state one number of nodes"
        )
    if node_rank is not None and node_rank >= plan.nnodes[1]:
        raise UserError(
            f"node rank {node_rank}: {plan.nnodes[1]} nodes are numbered from 0; use a smaller one"
        )
    return plan


def parse_nodes(words: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", words)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UserError(f"nnodes {words}: a number of nodes from 1 is needed, or MIN:MAX such as 2:4")
    return low, high


def check_endpoint(words: str) -> str:
    """`HOST:PORT`, or `HOST` for the usual port; an IPv6 address stands in brackets where a port follows."""
    if _is_ipv6(words):
        return f"[{words}]:{PORT}"
    match = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<name>[^\s:\[\]]+))(?::(?P<port>[0-9]{1,5}))?", words)
    if match is None or int(match["port"] or PORT) > 65535 or (match["six"] and not _is_ipv6(match["six"])):
        raise UserError(
            f"rdzv-endpoint {words}: HOST:PORT is needed, the same on all nodes, such as node1:{PORT}, or "
            f"[fd00::1]:{PORT} for an IPv6 address"
        )
    return words if match["port"] else f"{words}:{PORT}"


def _is_ipv6(words: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(words), ipaddress.IPv6Address)
    except ValueError:
        return False


def _count_ranks(plan: LaunchPlan) -> int:
    """One rank per GPU; without GPUs one."""
    import torch

    count = torch.cuda.device_count()
    plan.sources["ranks"] = f"{count} GPUs here" if count else "no GPU here"
    return count or 1


def _slurm_nodes(environment: Mapping[str, str]) -> int:
    nodes, tasks = (_slurm_number(environment, f"SLURM_STEP_NUM_{name}", "1") for name in ("NODES", "TASKS"))
    if tasks != nodes:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={tasks} on {nodes} nodes: one launch per node; use srun --ntasks-per-node=1"
        )
    return nodes


def _slurm_number(environment: Mapping[str, str], name: str, default: str) -> int:
    value = environment.get(name, default)
    if not value.isdecimal():
        raise UserError(
            f"{name}={value}: SLURM sets a whole number; unset it, or add --nnodes and --rdzv-endpoint"
        )
    return int(value)


def _endpoint(stated: str | None, environment: Mapping[str, str], plan: LaunchPlan, slurm: bool) -> str:
    if stated is not None:
        return check_endpoint(stated)
    if not slurm:
        raise UserError(
            f"nnodes {plan.nnodes[1]}: several nodes need a meeting point; add --rdzv-endpoint HOST:{PORT} with the "
            "name of the first node, the same on all nodes"
        )
    plan.sources["meeting point"] = "SLURM_STEP_NODELIST"
    job = _slurm_number(environment, "SLURM_JOB_ID", "0")
    return f"{_first_host(environment['SLURM_STEP_NODELIST'])}:{PORT + job % 1000}"


def _first_host(nodes: str) -> str:
    if not re.search(r"[\[,]", nodes):
        return nodes
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False
        )
        names = [] if done.returncode else done.stdout.split()
    except OSError:
        names = []
    if not names:
        raise UserError(
            f"SLURM_STEP_NODELIST={nodes}: scontrol cannot expand it; add --rdzv-endpoint HOST:{PORT}"
        )
    return names[0]


@dataclass(frozen=True)
class Outcome:
    """How the ranks of this node ended."""

    code: int = 0
    message: str = ""


def run_ranks(plan: LaunchPlan, words: Sequence[str], *, quiet: bool = False) -> Outcome:
    """Run `mmldlm WORDS` on all ranks of this node and wait for them. All output is also in the log folder.

    `quiet`: output is shown as it is, without the number of its rank, and kept nowhere.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(
        logging.CRITICAL
    )  # the outcome says it in one line
    _set_environment(plan)
    config = _agent_config(plan, quiet)
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "mmldlm", *words)
    except ChildFailedError as error:
        return _explain(error.failures, plan)
    except (RendezvousError, DistError) as error:  # nodes numbered by hand have no rendezvous, only its store
        reason = str(error).strip().splitlines()[0][:160]
        remedy = "is its node up, its port free and reachable? The same command on all nodes resumes the run"
        return Outcome(1, f"the nodes did not meet at {plan.rdzv_endpoint} ({reason}); {remedy}")
    except SignalException as stop:
        codes = _recorded_codes(config.logs_specs._run_log_dir)
        code = max(codes, default=0) or 128 + int(stop.sigval)
        return Outcome(code, ORDERLY.get(code, f"ended by {stop.sigval.name}"))
    return Outcome()


def own_address(endpoint: str) -> tuple[str | None, bool]:
    """Address by which this machine reaches the meeting point, and whether the point is that address.

    PyTorch compares the point with what the name of this machine resolves to, which on many is 127.0.1.1 or the
    address of another network card. None where the name is unknown or local, which PyTorch handles itself.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, _, _, point = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(point)  # sends nothing
            address = probe.getsockname()[0]
    except (OSError, ValueError):
        return None, False
    local = ipaddress.ip_address(point[0]).is_loopback
    return (None, False) if local else (address, address == point[0])


def _agent_config(plan: LaunchPlan, quiet: bool) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    shown = Std.NONE if quiet else Std.ALL
    static = plan.node_rank is not None and plan.nnodes != (1, 1)
    stamp = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
    address, hosts = own_address(plan.rdzv_endpoint) if plan.nnodes != (1, 1) else (None, False)
    return LaunchConfig(
        min_nodes=plan.nnodes[0],
        max_nodes=plan.nnodes[1],
        nproc_per_node=plan.nproc_per_node,
        run_id=plan.rdzv_id if plan.nnodes != (1, 1) else f"launch_{stamp}",
        rdzv_backend="static" if static else "c10d",
        rdzv_endpoint=plan.rdzv_endpoint,
        rdzv_configs={"rank": plan.node_rank} if static else {"is_host": True} if hosts else {},
        local_addr=address,
        max_restarts=plan.max_restarts,
        logs_specs=DefaultLogsSpecs(str(plan.log_dir), redirects=shown, tee=shown),
        log_line_prefix_template="[rank ${rank}] ",
        signals_to_handle=SIGNALS,
    )


def _set_environment(plan: LaunchPlan) -> None:
    """Threads are shared out among the ranks; an elastic agent inside another must not inherit its place."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, usable // plan.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE)


def _explain(failures: Mapping[int, Any], plan: LaunchPlan) -> Outcome:
    """The rank that failed of itself: the first of those that did not only lose another one."""
    from mmldlm.distributed.ranks import LostRankError

    ranked = sorted(
        failures, key=lambda rank: (_kind(failures[rank]) == LostRankError.__name__, failures[rank].timestamp)
    )
    rank = ranked[0]
    failure = failures[rank]
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    if code in ORDERLY:
        return Outcome(code, ORDERLY[code])
    elsewhere = _kind(failure) == LostRankError.__name__
    cause = (
        "the first failure is on another node, see its output" if elsewhere else f"root cause: rank {rank}"
    )
    text = _message(failure)
    where = "" if failure.error_file in ("", "<N/A>") else f" ({failure.error_file})"
    others = f"; ranks that failed after it: {', '.join(map(str, ranked[1:]))}" if ranked[1:] else ""
    return Outcome(
        code, f"{cause}, exit code {code}: {text}{where}{others}; logs of all ranks are in {plan.log_dir}"
    )


def _kind(failure: Any) -> str:
    message = failure.message
    return str(message.get("extraInfo", {}).get("kind", "")) if isinstance(message, dict) else ""


def _message(failure: Any) -> str:
    if isinstance(failure.message, dict):
        return str(failure.message.get("message", "no message"))
    if failure.exitcode < 0:
        out_of_memory = (
            ", which also ends a process when the memory of the machine is full"
            if failure.exitcode == -9
            else ""
        )
        return f"ended by {failure.signal_name()}{out_of_memory}"
    return "it left no message; see its stderr.log"


def _recorded_codes(folder: str | None) -> list[int]:
    """Exit codes that ranks of the last attempt wrote down."""
    attempts = sorted(Path(folder).glob("attempt_*"), key=lambda path: int(path.name[8:])) if folder else []
    codes = []
    for path in attempts[-1].glob("*/error.json") if attempts else ():
        try:
            codes.append(int(json.loads(path.read_text("utf-8"))["message"]["errorCode"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return codes
