"""The start of a rank under torchrun, and its end."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from mmldlm.config import Config, DistributedConfig
from mmldlm.config.recipe import config_to_dict, flatten
from mmldlm.distributed.peers import Peers, fresh_store
from mmldlm.distributed.ranks import Ranks, is_of_exchange
from mmldlm.errors import Interrupted, UserError
from mmldlm.runtime import choose_device, code_digest, versions

log = logging.getLogger(__name__)

_HARMFUL = {
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"): "a rank that fails would leave the others waiting; unset it",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "the host would wait for every sum on the GPU; unset it",
    ("NCCL_BLOCKING_WAIT", "1"): "the host would wait for every sum on the GPU; unset it",
    ("TORCH_NCCL_ENABLE_MONITORING", "0"): "it switches the watchdog off; unset it",
}
_READ_BY_NOTHING = ("NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT")
_OWN = (
    "data.store", "data.num_workers", "data.prefetch", "data.pin_memory", "data.worker_timeout",
    "data.worker_restarts", "train.num_threads", "train.device",
)  # fmt: skip
"""Settings in which machines may differ: they change no result. The content of the store is compared instead."""
_NUMERIC = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE", "TRITON_INTERPRET", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
"""Variables that change what is computed, or how it is summed."""


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is, as torchrun sets it in the environment."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def read_place(environment: Mapping[str, str]) -> RankPlace:
    """One rank of its own where nothing is set."""
    if environment.get("WORLD_SIZE", "1") == "1":
        return RankPlace()
    world_size = _number(environment, "WORLD_SIZE")
    local = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else world_size
    place = RankPlace(_number(environment, "RANK"), world_size, _number(environment, "LOCAL_RANK"), local)
    if not 0 <= place.rank < world_size:
        raise UserError(
            f"RANK={place.rank}: allowed is 0 to {world_size - 1}, WORLD_SIZE is {world_size}; use torchrun"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise UserError(f"{name} is not set, but WORLD_SIZE={world_size} is; start the run with torchrun")
    return place


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise UserError(
            f"{name}={value!r}: a whole number is needed when WORLD_SIZE is set; start the run with torchrun"
        )
    return int(value)


@contextlib.contextmanager
def start_ranks(config: Config) -> Iterator[Ranks]:
    """Join the other ranks for as long as the `with` lasts; leave together."""
    place = read_place(os.environ)
    if place.world_size == 1 and not _wants_group(config.distributed, os.environ):
        yield Ranks(device=choose_device(config.train.device))
        return
    ranks = _join(config, place)
    if ranks.main:
        _warn_of_environment(os.environ)
    try:
        with _naming_lost(ranks):
            yield ranks
            ranks.barrier()
    except BaseException as error:
        if ranks.peers is not None:
            ranks.peers.leave(error)
        if not isinstance(error, Interrupted) and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()  # a sum that cannot end must not hold this process
            raise
        dist.destroy_process_group()
        raise
    if ranks.peers is not None:
        ranks.peers.close()
    dist.destroy_process_group()


@contextlib.contextmanager
def _naming_lost(ranks: Ranks) -> Iterator[None]:
    """Whatever was broken off because a rank is gone names that rank."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_exchange(error):
            raise
        raise ranks.lost(str(error)) from error


def _join(config: Config, place: RankPlace) -> Ranks:
    settings, device = config.distributed, choose_device(config.train.device)
    backend = settings.backend or ("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        device = _own_gpu(place, backend)
    elif device.type != "cpu":
        raise UserError(
            f"train.device={device}: several ranks need CUDA GPUs or CPUs; use train.device=cpu, or one process"
        )
    elif backend == "nccl":
        raise UserError("distributed.backend=nccl: needs GPUs, this run is on the CPU; use gloo or null")
    timeout = datetime.timedelta(minutes=settings.timeout_minutes)
    bound = device if backend == "nccl" else None
    try:
        peers = _find_peers(place, timeout) if place.world_size > 1 else None
        if peers is not None:
            peers.compare("settings", _facts(config, backend))
        dist.init_process_group(
            backend,
            store=dist.HashStore() if peers is None else peers.store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=bound,
        )
        host = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {place.rank} of {place.world_size}: the ranks did not find each other at {address} "
            f"({str(error).strip().splitlines()[0][:160]}); check that all were started and reach that address"
        ) from error
    if peers is not None:
        peers.start()
    return Ranks(
        place.rank, place.world_size, place.local_world_size, device, host, settings.timeout_minutes, peers
    )


def _wants_group(settings: DistributedConfig, environment: Mapping[str, str]) -> bool:
    """Whether a single rank joins a group of its own: to hold all shards, or under torchrun with a backend named."""
    return settings.parallel != "ddp" or (settings.backend is not None and "RANK" in environment)


def _find_peers(place: RankPlace, timeout: datetime.timedelta) -> Peers:
    store, _, _ = next(iter(rendezvous("env://", place.rank, place.world_size, timeout=timeout)))
    store.set_timeout(timeout)
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = fresh_store(store, place.rank, place.world_size, timeout.total_seconds())
    return Peers(store, place.rank, place.world_size, own_store=own_store)


def _facts(config: Config, backend: str) -> dict[str, object]:
    """What must be the same on all ranks before they begin."""
    settings = {name: value for name, value in flatten(config_to_dict(config)).items() if name not in _OWN}
    settings["distributed.backend"] = backend
    libraries = {name: version for name, version in versions().items() if name != "gpu"}
    environment = {name: os.environ.get(name) for name in _NUMERIC}
    return settings | libraries | {"code of mmldlm": code_digest()} | environment


def _own_gpu(place: RankPlace, backend: str) -> torch.device:
    count = torch.cuda.device_count()
    if place.local_rank >= count and backend == "nccl":
        raise UserError(
            f"LOCAL_RANK={place.local_rank}: this machine has {count} GPUs; start torchrun with "
            f"--nproc-per-node {count}, or share GPUs with distributed.backend=gloo"
        )
    device = torch.device("cuda", place.local_rank % count)
    torch.cuda.set_device(device)
    return device


def _warn_of_environment(environment: Mapping[str, str]) -> None:
    for (name, value), why in _HARMFUL.items():
        if environment.get(name) == value:
            log.warning("%s=%s: %s", name, value, why)
    for name in _READ_BY_NOTHING:
        if name in environment:
            log.warning("%s is read by nothing; use distributed.timeout_minutes", name)
