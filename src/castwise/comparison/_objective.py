"""How a batch becomes a loss, and how its samples are split to run in other groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from castwise._torch_private import tree_leaves, tree_map
from castwise.comparison._kept_values import Kept, tensors_in
from castwise.tracing._batches import arguments_of

Loss = Callable[[Any, Any], torch.Tensor]
Around = Callable[[torch.Tensor], AbstractContextManager[Any]]
Forward = Callable[[nn.Module, Any], torch.Tensor]
Progress = Callable[[str, int, int], None]


class Objective:
    """A model and the function that computes the loss of a batch.

    Args:
        model: The model, unwrapped.
        loss: Function of outputs and targets; None with a `forward`.
        forward: Function of the model and a batch; None with a `loss`.
    """

    def __init__(self, model: nn.Module, loss: Loss | None, forward: Forward | None) -> None:
        if (loss is None) is (forward is None):
            raise TypeError(
                "give either loss=, a function of outputs and targets, or forward=, a function of the model and a batch"
            )
        for name, given in (("loss", loss), ("forward", forward)):
            if given is not None and not callable(given):
                raise TypeError(f"{name} must be a function that returns the loss as a tensor, got {given!r}")
        self.model, self.loss, self._forward = model, loss, forward

    def calling(self, call: Any) -> Objective:
        """Return the objective of another callable than the model."""
        return Objective(call, self.loss, self._forward)

    def __call__(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """Return the outputs (None with a `forward`) and the loss of a batch."""
        if self._forward is not None:
            return None, _checked(self._forward(self.model, batch), "forward")
        args, kwargs = arguments_of(batch[0])
        outputs = self.model(*args, **kwargs)
        return outputs, self.loss_of(outputs, batch)

    def in_parts(
        self, batch: Any, parts: Sequence[torch.Tensor], size: int, around: Around = lambda part: nullcontext()
    ) -> tuple[Any, torch.Tensor]:
        """Run the samples of a batch in parts, and return outputs in the batch's order, and the loss.

        With a `forward`, the loss is the mean of the parts' losses, weighted by their numbers of samples. Losses and
        other floating-point scalars that the model returns are averaged in the same way.

        Args:
            batch: The batch.
            parts: The sample indices of each part.
            size: The number of samples in the batch.
            around: Returns a context for the run of each part.
        """
        outputs, losses = [], []
        for part in parts:
            with around(part):
                if self._forward is not None:
                    losses.append(self(selected(batch, part, size))[1] * (len(part) / size))
                else:
                    args, kwargs = arguments_of(selected(batch[0], part, size))
                    outputs.append(self.model(*args, **kwargs))
        if self._forward is not None:
            return None, torch.stack(losses).sum()
        joined = _joined(outputs, parts)
        return joined, self.loss_of(joined, batch)

    def loss_of(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the loss of a batch from its outputs."""
        assert self.loss is not None
        return _checked(self.loss(outputs, batch[1]), "loss")

    def check(self, batches: Any) -> list[Any]:
        """Check batches and return them as a list.

        Raises:
            TypeError: `batches` is not a collection, or a batch is not a pair of inputs and targets.
            ValueError: There are no batches.
        """
        if not isinstance(batches, Collection) or isinstance(batches, (torch.Tensor, str, dict)):
            raise TypeError(
                "batches must be a list or another collection, because they are run more than once, "
                f"got {type(batches).__name__}: give list(batches), or some of them"
            )
        checked = list(batches)
        if not checked:
            raise ValueError("batches must have at least one batch, got none")
        for number, batch in enumerate(checked):
            if self._forward is None and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
                kind = f"{len(batch)} values" if isinstance(batch, (tuple, list)) else type(batch).__name__
                raise TypeError(
                    f"batches[{number}] must be (inputs, targets), got {kind}: for other batches, give "
                    "forward=lambda model, batch: ..., which returns the loss"
                )
        return checked

    def size_of(self, batch: Any) -> int:
        """Return the number of samples in a batch: the first dimension of its first tensor.

        Raises:
            ValueError: The batch has no samples, or no tensor with dimensions.
        """
        inputs = batch if self._forward is not None else batch[0]
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                if not leaf.shape[0]:
                    raise ValueError("vary needs batches of samples, got one that is empty")
                return leaf.shape[0]
        raise ValueError("vary needs batches of samples: the first dimension of the first tensor must be the samples")


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an error reports that memory ran out, which is unrelated to the precision."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"


def fresh(batch: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with copies of its tensors, so that the model may write to them."""
    kept = Kept(batch)
    copies = []
    for given, tensor in zip(tensors_in(batch), kept.tensors, strict=True):
        copy = cast(tensor)
        copy = copy.clone() if copy is tensor else copy
        copies.append(copy.requires_grad_(given.requires_grad))
    return kept.with_tensors(copies)


def selected(value: Any, samples: torch.Tensor, size: int) -> Any:
    """Return some samples of a batch. Tensors whose first dimension is not the batch size are kept whole."""

    def selected_leaf(leaf: Any) -> Any:
        is_of_samples = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == size
        return leaf.index_select(0, samples.to(leaf.device)) if is_of_samples else leaf

    return tree_map(selected_leaf, value)


def _joined(outputs: list[Any], parts: Sequence[torch.Tensor]) -> Any:
    order = torch.cat(list(parts)).argsort()
    leaves = [[leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)] for output in outputs]
    joined = iter(
        [
            torch.cat(same).index_select(0, order.to(same[0].device))
            if same[0].ndim and all(len(part) == len(other) for part, other in zip(parts, same, strict=True))
            else _mean_of(same, parts)
            for same in zip(*leaves, strict=True)
        ]
    )
    return tree_map(lambda leaf: next(joined) if isinstance(leaf, torch.Tensor) else leaf, outputs[0])


def _mean_of(same: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean, weighted by samples, of scalars that parts return; the first part's value for other tensors."""
    if same[0].ndim or not same[0].is_floating_point():
        return same[0]
    sizes = same[0].new_tensor([len(part) for part in parts])
    return (torch.stack(list(same)) * sizes).sum() / sizes.sum()


def _checked(loss: Any, name: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"{name} must return the loss as a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"the loss must have one element, got shape {tuple(loss.shape)}: reduce it in {name}")
    return loss.reshape(())
