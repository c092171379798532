"""Training in one process, or in several processes started by torchrun."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from castwise._user_error import UserError
from castwise.demo.gpt import GPT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STRATEGIES = ("ddp", "fsdp", "fsdp2", "tp")
_T = TypeVar("_T")


def is_first() -> bool:
    """Return True if this process prints and writes for all processes."""
    return os.environ.get("RANK", "0") == "0"


class Ranks:
    """The processes of a run; with a single process, collective operations are local.

    Args:
        strategy: How to split the model, one of `STRATEGIES`, or None for one process.
        device: The device of the model: the CPU, or one GPU per process.

    Raises:
        UserError: The strategy is unknown, or torchrun did not start the processes it needs.
    """

    def __init__(self, strategy: str | None, device: torch.device) -> None:
        if strategy is not None and strategy not in STRATEGIES:
            raise UserError(f"--strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if strategy is None and size > 1:
            raise UserError(f"{size} processes were started: choose with --strategy how to split the model")
        if strategy is not None and "RANK" not in os.environ:
            raise UserError(
                f"--strategy {strategy} needs several processes: "
                f"torchrun --nproc-per-node 2 -m castwise demo --strategy {strategy}"
            )
        self.strategy, self.size, self.rank = strategy, size, int(os.environ.get("RANK", "0"))
        self._mesh: DeviceMesh | None = None
        self._splitting: Any = _NotSplit
        if strategy is not None:
            # FSDP2 and torch's scaler trigger warnings with their own calls.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed")
            if device.type == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            from torch.distributed.device_mesh import init_device_mesh

            from castwise.demo import splitting

            self._splitting = splitting
            self._mesh = init_device_mesh(device.type, (size,))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the process group."""
        if self._mesh is None:
            return
        if error is None:
            dist.barrier()
        # The interpreter often aborts if a gloo group exists when it exits.
        self._mesh = None
        dist.destroy_process_group()
        gc.collect()

    def first(self, function: Callable[[], _T]) -> _T:
        """Call a function in the first process, and return its result or raise its UserError in all processes."""
        if self._mesh is None:
            return function()
        outcome: list[Any] = [None]
        if is_first():
            try:
                outcome = [function()]
            except UserError as error:
                outcome = [error]
        dist.broadcast_object_list(outcome)
        if isinstance(outcome[0], UserError):
            raise outcome[0]
        result: _T = outcome[0]
        return result

    def any_(self, flag: bool) -> bool:
        """Return True if a flag is set on any rank."""
        return flag if self._mesh is None else self.mean(torch.tensor(float(flag))) > 0

    def mean(self, number: Tensor) -> float:
        """Return the mean of a number, shape (), over all ranks."""
        if self._mesh is None:
            return number.item()
        total = number.detach().to(self._mesh.device_type, torch.float64)
        dist.all_reduce(total)
        return total.item() / self.size

    def share(self, batch: Tensor) -> Tensor:
        """Return this rank's part of a batch of shape (batch, ...), or all of it if the model is split by tensors.

        Raises:
            UserError: The batch cannot be split evenly.
        """
        if self._mesh is None or self.strategy == "tp":
            return batch
        if len(batch) % self.size:
            raise UserError(f"a batch of {len(batch)} sequences cannot be split between {self.size} processes")
        return batch.chunk(self.size)[self.rank]

    def split(self, model: GPT) -> nn.Module:
        """Wrap or split a model, which is identical on all ranks, for the strategy."""
        return model if self._mesh is None else self._splitting.split(model, self.strategy, self._mesh)

    def clip_grad_norm_(self, model: nn.Module, max_norm: float) -> None:
        """Clip gradients with torch's method for the strategy."""
        self._splitting.clip_grad_norm_(model, max_norm)

    def weights(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's full weights by their unsplit names, on every rank."""
        weights: dict[str, Any] = self._splitting.weights(model)
        return weights

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state, on every rank."""
        state: dict[str, Any] = self._splitting.optimizer_state(model, optimizer)
        return state

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Any], state: dict[str, Any]
    ) -> None:
        """Load results of `weights` and `optimizer_state`."""
        self._splitting.load(model, optimizer, weights, state)


class _NotSplit:
    """The functions of `splitting` for a model that is not split."""

    @staticmethod
    def clip_grad_norm_(model: nn.Module, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    @staticmethod
    def weights(model: nn.Module) -> dict[str, Any]:
        return model.state_dict()

    @staticmethod
    def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    @staticmethod
    def load(model: nn.Module, optimizer: torch.optim.Optimizer, whole: dict[str, Any], state: dict[str, Any]) -> None:
        model.load_state_dict(whole)
        optimizer.load_state_dict(state)
