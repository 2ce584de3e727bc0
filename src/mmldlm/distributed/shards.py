"""The denoiser divided among ranks by FSDP2, and which rows of each parameter a rank holds.

A rank holds some rows of every parameter. Before a block computes, its rows are gathered from all ranks; in the
backward pass its gradients are summed, and each rank keeps the sums of its own rows. Optimizer, average, clipping and
checkpoints see these rows as plain parameters under their usual names (`held`). Ranks that hold the same rows are
replicas of each other.

A rank that fails cannot leave the others waiting (see `lockstep`). After a step that one failed in all ranks put FSDP2
back into the state between two steps.
"""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

# set_custom_all_gather and set_custom_reduce_scatter are public; what they take has no public name
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from mmldlm.config import DistributedConfig
from mmldlm.distributed.lockstep import Exchange, Lockstep
from mmldlm.distributed.ranks import Ranks
from mmldlm.distributed.replicas import KINDS, Applied, weights_digest
from mmldlm.errors import UserError
from mmldlm.types import Piece

T = TypeVar("T")
# PyTorch 2.13 has new names for these
_gather_rows: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_sum_rows: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# nothing in the network works in place, which is what this warning is about
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class Shards:
    """Runs the passes of a step on rows that are gathered for them; gradients end up in `held`."""

    def __init__(
        self, network: nn.Module, blocks: Iterable[nn.Module], ranks: Ranks, config: DistributedConfig,
        precision: torch.dtype,
    ) -> None:  # fmt: skip
        """`precision` is that of matrix products, in which the rows of blocks travel if the settings say no other."""
        self.ranks = ranks
        # an update on the host waits for the device inside a step, perhaps for a rank that is gone
        self.lockstep = Lockstep(ranks, foresees=not config.cpu_offload)
        self.module: Any = Applied(network)
        mesh = make_mesh(ranks, config.parallel)
        self.group = mesh.get_group(mesh.ndim - 1)
        self.num_shards, self.index = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.num_replicas = max(1, ranks.world_size // self.num_shards)
        self.replica = ranks.rank // self.num_shards
        self._divide(list(blocks), mesh, config, precision)
        self.parameters: dict[str, Any] = dict(network.named_parameters())
        """Name -> the DTensor whose local part is held."""
        self.pieces = {name: self._piece(parameter) for name, parameter in self.parameters.items()}
        self.held = {
            name: nn.Parameter(part._local_tensor.detach()) for name, part in self.parameters.items()
        }

    def _divide(
        self, blocks: list[nn.Module], mesh: DeviceMesh, config: DistributedConfig, precision: torch.dtype
    ) -> None:
        summed = KINDS.get(config.compression, torch.float32)
        kind = {"fp32": torch.float32, **KINDS}.get(config.gather or "", precision)
        offload: OffloadPolicy = OffloadPolicy()
        if config.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.ranks.device.type == "cuda")
        # autocast chooses the types of operations, so inputs stay as they are
        for_blocks = MixedPrecisionPolicy(kind, summed, cast_forward_inputs=False)
        for_rest = MixedPrecisionPolicy(None, summed, cast_forward_inputs=False)
        for block in blocks:
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=for_blocks,
                offload_policy=offload,
                reshard_after_forward=config.reshard,
            )
        # what is left, embeddings and heads, is needed from the first operation to the last
        fully_shard(
            self.module, mesh=mesh, mp_policy=for_rest, offload_policy=offload, reshard_after_forward=False
        )
        for part in self._modules():
            part.set_gradient_divide_factor(1.0)  # a part of the loss is a local sum over a global count
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_all_gather(_Gather(self.lockstep))
            part.set_custom_reduce_scatter(
                _Scatter(self.lockstep, mesh.get_group(0) if mesh.ndim > 1 else None)
            )

    def _piece(self, parameter: Any) -> Piece:
        rows = -(-parameter.shape[0] // self.num_shards)
        start = min(self.index * rows, parameter.shape[0])
        piece = Piece(start, min(rows, parameter.shape[0] - start), tuple(parameter.shape))
        assert piece.rows == parameter._local_tensor.shape[0]
        return piece

    def __call__(self, compute: Callable[[Any], T]) -> T:
        """Compute with the network, whose rows are gathered block by block; inside `run`."""
        result: T = self.module(compute)
        return result

    def run(self, passes: Sequence[Callable[[], T]], losses: str = "all") -> list[T]:
        """All passes of a step, forward and backward each; the last one adds up the gradients of all ranks."""

        def work() -> list[T]:
            done: list[T] = []
            for number, each in enumerate(passes, start=1):
                self.module.set_requires_gradient_sync(number == len(passes))
                done.append(each())
            return done

        done = self.lockstep.run((losses, len(passes)), work, self._reset)
        self._collect()
        return done

    def _collect(self) -> None:
        """Move the gradients to the parameters that the optimizer has."""
        for name, parameter in self.parameters.items():
            self.held[name].grad = None if parameter.grad is None else parameter.grad._local_tensor
            parameter.grad = None

    def train_only(self, names: Iterable[str]) -> None:
        """From now on only these parameters get gradients."""
        chosen = set(names)
        self.lockstep.forget()
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in chosen)
            parameter.grad = self.held[name].grad = None
        # FSDP2 copies the flag and the types when it first gathers, and has no public way to renew them
        for group in self._groups():
            for part in group.fsdp_params:
                if hasattr(part, "_unsharded_param"):
                    part._unsharded_param.requires_grad_(part.sharded_param.requires_grad)
            group._init_mp_dtypes()

    def _modules(self) -> list[FSDPModule]:
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def _groups(self) -> list[Any]:
        groups = [fully_shard.state(part)._fsdp_param_group for part in self._modules()]  # type: ignore[attr-defined]
        return [group for group in groups if group is not None]

    def _reset(self) -> None:
        """Bring FSDP2, which was left in the middle of a pass, back to where a step begins; it offers no way itself."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
        for part in self._modules():
            state = fully_shard.state(part)  # type: ignore[attr-defined]
            state._training_state = type(state._training_state).IDLE
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            state._modules_to_run_forward.clear()
            state._comm_ctx.all_gather_state = None
            state._comm_ctx.post_forward_order.clear()
            if hasattr(state._comm_ctx, "reduce_scatter_states"):
                state._comm_ctx.reduce_scatter_states.clear()
            else:
                state._comm_ctx.reduce_scatter_state = None
        for group in self._groups():
            group._training_state = type(group._training_state).IDLE
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._to_sharded()
            for part in group.fsdp_params:
                part.unsharded_accumulated_grad = part.sharded_param.grad = part.grad_offload_event = None
                if hasattr(part, "_unsharded_param"):
                    part._unsharded_param.grad = None

    def rows(self, name: str, rows: slice) -> slice:
        """Those of some rows of a whole parameter that are held here, counted from the first one held."""
        piece = self.pieces[name]
        start, stop, _ = rows.indices(piece.shape[0])
        first = min(max(start - piece.start, 0), piece.rows)
        return slice(first, max(first, min(stop - piece.start, piece.rows)))

    def norms(self, parts: Sequence[Tensor | None]) -> Tensor:
        """The norm of each whole tensor of which these are the rows held here; 0 for None, on the device."""
        here = [part for part in parts if part is not None and part.numel()]
        norms = iter(torch._foreach_norm(here)) if here else iter(())
        zero = torch.zeros((), device=here[0].device if here else self.ranks.device)
        local = torch.stack([zero if part is None or not part.numel() else next(norms) for part in parts])
        squares = local.to(self.ranks.device).double().square()  # exact, so that one rank changes no bit
        return (self.sum(squares) / self.num_replicas).sqrt().float()

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, with the same bits on each."""
        if self.ranks.several:
            with self.ranks.exchange():
                dist.all_reduce(tensor)
        return tensor

    def whole(self, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gather tensors of which each rank holds its rows, one after another; on the first replica, to be used up."""
        for name, tensor in held.items() if self.replica == 0 else []:
            yield name, self.gathered(tensor.detach()[None], self.pieces[name])[0]

    def gathered(self, rows: Tensor, piece: Piece) -> Tensor:
        """(n, rows, columns): what this rank holds of n equal matrices -> (n, all rows, columns), on the device."""
        most = -(-piece.shape[0] // self.num_shards)
        own = torch.zeros((len(rows), most, *piece.shape[1:]), dtype=rows.dtype, device=self.ranks.device)
        own[:, : piece.rows] = rows
        every = own.new_empty((self.num_shards, *own.shape))
        with self.ranks.exchange():
            _gather_rows(every.view(-1), own.view(-1), group=self.group)
        return every.transpose(0, 1).flatten(1, 2)[:, : piece.shape[0]].contiguous()

    def new_host_group(self) -> Any:
        """Another group of all ranks over gloo; a rank that is gone is noticed before it would be waited for."""
        self.ranks.barrier()
        return dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=self.ranks.timeout_minutes))

    def compare(self, step: int, compared: int) -> None:
        """Reject replicas whose rows differ after a step; they were last compared after step `compared`."""
        if self.num_replicas == 1:
            return
        every = torch.zeros(self.ranks.world_size, dtype=torch.int64)
        every[self.ranks.rank] = int(weights_digest(self.held.values()))
        digests = self.ranks.tensor_from_each(every).view(self.num_replicas, self.num_shards)
        different = (digests != digests[0]).nonzero().tolist()
        if different:
            replica, index = different[0]
            raise UserError(
                f"rank {replica * self.num_shards + index} and rank {index} hold the same part of the weights, which "
                f"differs after step {step} ({len(different)} such ranks); they were equal after step {compared}; a "
                f"device, its memory or a library on one of them is faulty: leave it out; the same command resumes "
                f"from the last checkpoint"
            )


def make_mesh(ranks: Ranks, parallel: str) -> DeviceMesh:
    """All ranks in a row, or under hybrid a row for each machine."""
    device, local = ranks.device.type, ranks.local_world_size
    if parallel == "fsdp":
        return init_device_mesh(device, (ranks.world_size,), mesh_dim_names=("shards",))
    if not ranks.all_equal(local) or ranks.world_size % local:
        raise UserError(
            f"distributed.parallel=hybrid: {ranks.world_size} ranks do not lie on machines of {local} each; start the "
            f"same number on every machine, or use distributed.parallel=fsdp"
        )
    shape = (ranks.world_size // local, local)
    return init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards"))


class _Gather(AllGather):
    """FSDP2's gathering of a block's rows, begun by all ranks."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(math.prod(map(int, size)), dtype=dtype, device=device).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        like_output, like_input = _like(output_tensor), _like(input_tensor)
        self.lockstep.begin(
            Exchange(
                ("gather", *like_output, *like_input),
                lambda: _gather_rows(_zeros(*like_output), _zeros(*like_input), group=group),
            )
        )
        with self.lockstep.ranks.exchange():
            return _gather_rows(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(ReduceScatter):
    """FSDP2's sum of a block's gradients, begun by all ranks; under hybrid a sum over `replicas` follows it."""

    def __init__(self, lockstep: Lockstep, replicas: Any) -> None:
        self.lockstep, self.replicas = lockstep, replicas

    allocate = _Gather.allocate  # type: ignore[assignment]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        like_output, like_input = _like(output_tensor), _like(input_tensor)

        def take_part() -> None:
            rows = _zeros(*like_output)
            _sum_rows(rows, _zeros(*like_input), op=op, group=group)
            if self.replicas is not None:
                dist.all_reduce(rows, op, group=self.replicas)

        self.lockstep.begin(Exchange(("scatter", *like_output, *like_input), take_part))
        with self.lockstep.ranks.exchange():
            return _sum_rows(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _like(tensor: Tensor) -> tuple[int, torch.dtype, torch.device]:
    return tensor.numel(), tensor.dtype, tensor.device


def _zeros(size: int, kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=kind, device=device)
