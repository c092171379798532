"""`not-in-optimizer` and `never-updated`: parameters that get gradients are stepped, and change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from castwise._invariants.invariant import Violation, named
from castwise._live_objects import instances_of
from castwise.amp._devices import is_capturing
from castwise.amp._gradients import params_of
from castwise.amp._readback import DELAY, Readback

_SAMPLED = 1024  # elements of a parameter that are compared
_OF_LR = 0.01  # Adam's step is about the learning rate; a hundredth of that must still change a weight
_LARGE = 0.1  # share of an optimizer's elements
Named = Mapping[str, torch.Tensor]


@dataclass
class _Sample:
    """Some elements of a parameter at a check.

    Args:
        name: The parameter's name.
        param: The parameter.
        optimizer: What steps it; None if no optimizer does.
        steps: Number of that optimizer's steps before.
        values: Copies of its elements.
        lr: The learning rate that it is stepped with.
        is_adaptive: Whether its steps do not depend on the size of its gradient.
    """

    name: str
    param: torch.Tensor
    optimizer: torch.optim.Optimizer | None
    steps: int
    values: torch.Tensor
    lr: Any
    is_adaptive: bool


class TrainedWeights:
    """Compares a sample of each parameter between two checks.

    Args:
        model: The model.
        parameters: Returns the model's parameters by name.
        optimizers: The optimizers.
    """

    def __init__(
        self, model: nn.Module, parameters: Callable[[], Named], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._model, self._parameters, self._optimizers = model, parameters, optimizers
        self._frozen = {name for name, param in parameters().items() if not param.requires_grad}
        self._steps = Counter[torch.optim.Optimizer]()
        self._without_gradient: dict[torch.optim.Optimizer, list[torch.Tensor]] = {}
        self._samples: list[_Sample] = []
        self._pending: list[tuple[int, list[_Sample], Readback]] = []
        self._zero_rates = 0
        self._checks = 0

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which parameters of an optimizer have gradients; called before each step."""
        without = self._without_gradient.get(optimizer)
        if without is None:
            without = [param for param in params_of(optimizer) if param.requires_grad]
        self._without_gradient[optimizer] = [param for param in without if param.grad is None] if without else without

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that was taken."""
        self._steps[optimizer] += 1
        self.note_gradients(optimizer)

    def check(self, iteration: int) -> Iterator[Violation]:
        """Compare with the samples of the check before, and yield what is known already; called before a step.

        Args:
            iteration: Number of steps so far.
        """
        parameters = self._parameters()
        if any(map(is_capturing, parameters.values())):
            return
        self._checks += 1
        self._compare(iteration)
        samples = [*self._sampled_of_optimizers(parameters), *self._sampled_without_optimizer(parameters)]
        self._samples = _copied(samples)
        yield from self._of_rates(iteration)

    def results(self, iteration: int) -> Iterator[Violation]:
        """Yield what comparisons have found that have reached the host; waits for none."""
        while self._pending and (self._pending[0][2].is_on_host or iteration >= self._pending[0][0] + DELAY):
            since, samples, readback = self._pending.pop(0)
            stands_still = [
                sample
                for sample, (differ, would_differ) in zip(samples, readback.wait().tolist(), strict=True)
                if not differ and would_differ
            ]
            yield from self._standing_still([each for each in stands_still if each.optimizer is not None], since)
            yield from self._not_in_optimizer([each for each in stands_still if each.optimizer is None], since)

    def clear(self) -> None:
        """Drop all copies."""
        self._samples, self._pending = [], []
        self._without_gradient.clear()

    # -- samples ------------------------------------------------------------------------------------------------

    def _sampled_of_optimizers(self, parameters: Named) -> Iterator[_Sample]:
        names = {id(param): name for name, param in parameters.items()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    # Steps in 16 bits may be lost, which is a mistake of its own, or kept elsewhere.
                    if _can_compare(param) and param.dtype.itemsize >= 4:
                        is_adaptive = "exp_avg" in optimizer.state.get(param, {})
                        name = names.get(id(param), "a parameter")
                        steps, lr = self._steps[optimizer], group.get("lr", 1.0)
                        yield _Sample(name, param, optimizer, steps, _sample(param), lr, is_adaptive)

    def _sampled_without_optimizer(self, parameters: Named) -> Iterator[_Sample]:
        own = {id(param) for optimizer in self._optimizers for param in params_of(optimizer)}
        left = {name: param for name, param in parameters.items() if id(param) not in own and _can_compare(param)}
        for name, param in _in_plain_containers(self._model):
            if id(param) not in own and _can_compare(param):
                left.setdefault(name, param)
        if left:
            others = {id(param) for optimizer in _all_optimizers() for param in params_of(optimizer)}
            for name, param in left.items():
                if id(param) not in others:
                    yield _Sample(name, param, None, 0, _sample(param), 0.0, False)

    def _compare(self, iteration: int) -> None:
        """Start to compare all samples with what their parameters are now."""
        samples = [each for each in self._samples if each.optimizer is None or self._steps[each.optimizer] > each.steps]
        of_kinds: dict[Any, list[tuple[_Sample, torch.Tensor, torch.Tensor]]] = {}
        for each in samples:
            if _can_compare(each.param):
                now, gradient = _sample(each.param), _sample(each.param.grad)
                if now.numel() and now.shape == each.values.shape:
                    kind = each.values.device, each.values.dtype, gradient.dtype, each.optimizer, id(each.lr)
                    of_kinds.setdefault((*kind, each.is_adaptive), []).append((each, now, gradient))
        if not of_kinds:
            return
        flags = [_flags(*map(list, zip(*of_kind, strict=True))) for of_kind in of_kinds.values()]
        compared = [sample for of_kind in of_kinds.values() for sample, *_ in of_kind]
        device = flags[0].device
        self._pending.append((iteration, compared, Readback(torch.cat([each.to(device) for each in flags]))))

    # -- what is broken -----------------------------------------------------------------------------------------

    def _standing_still(self, samples: list[_Sample], iteration: int) -> Iterator[Violation]:
        if samples:
            names = tuple(sample.name for sample in samples)
            remedy = (
                "Look for code that writes the weights back, or for an optimizer whose step does nothing with them."
            )
            if not any(sample.values.any() for sample in samples):
                remedy += (
                    " A parameter of 0 stays 0 under LAMB and LARS, which multiply a step by the norm of the weights: "
                    "let the trust ratio be 1 where a norm is 0."
                )
            yield Violation(
                "never-updated",
                f"{named(names)}: stepped with a gradient that is not zero, and not changed between the last check "
                f"and step {iteration:,}.",
                remedy,
                # A temperature, say, that a script clamps, and that stays at the bound.
                "note" if all(sample.param.numel() == 1 for sample in samples) else "warning",
                names,
            )

    def _not_in_optimizer(self, samples: list[_Sample], iteration: int) -> Iterator[Violation]:
        if not samples:
            return
        names = tuple(sample.name for sample in samples)
        of_model = {id(param) for param in self._parameters().values()}
        stale = [
            param
            for params in self._without_gradient.values()
            for param in params
            if id(param) not in of_model and param.grad is None
        ]
        plain = {name for name, _ in _in_plain_containers(self._model)}
        unfrozen = self._frozen.intersection(names)
        text = f"{named(names)}: has a gradient at step {iteration:,}, is in no optimizer, and does not change."
        remedy = "Give it to an optimizer; if it is meant to stay as it is, requires_grad_(False) saves its gradient."
        severity: Any = "warning"
        if stale:
            shapes = named([str(tuple(param.shape)) for param in stale])
            text += f" The optimizer holds parameters that the model no longer has, of shape {shapes}."
            remedy = "Make the optimizer after the last change of the model (resizing, wrapping, moving)."
        elif plain.intersection(names):
            text += " Its module is in a plain list or dict, so model.parameters() does not have it."
            remedy = "Use nn.ModuleList, nn.ModuleDict or nn.ParameterList."
        elif unfrozen:
            text += " It was frozen when the optimizer was made."
            remedy = "Call optimizer.add_param_group for what is unfrozen."
        else:
            severity = "note"
        yield Violation("not-in-optimizer", text, remedy, severity, names)

    def check_gradients(self, optimizer: torch.optim.Optimizer, iteration: int) -> Iterator[Violation]:
        """Yield what is broken if parameters of an optimizer had no gradient in any step so far."""
        without, parameters = self._without_gradient.get(optimizer, []), self._parameters()
        stepped = [param for param in params_of(optimizer) if param.requires_grad]
        names = {id(param): name for name, param in parameters.items()}
        if len(without) < len(stepped):  # what the model no longer has is reported with what it has instead
            without = [param for param in without if id(param) in names]
        if not without:
            return
        known = tuple(names.get(id(param), f"a tensor of shape {tuple(param.shape)}") for param in without)
        remedy = "Look for detach(), no_grad() or a module that is not called; freeze what is meant to stay as it is."
        if len(without) == len(stepped):
            text = (
                f"{type(optimizer).__name__} has taken {iteration:,} steps without a gradient: nothing is trained. It "
                f"holds {named(known)}."
            )
            remedy = "Make the optimizer from the parameters of the model that computes the loss."
            yield Violation("never-updated", text, remedy, "warning", known)
            return
        text = f"{named(known)}: no gradient in {iteration:,} steps of {type(optimizer).__name__}."
        large = sum(param.numel() for param in without) >= _LARGE * sum(param.numel() for param in stepped)
        parts = _whole_parts(known, parameters)
        yield Violation("never-updated", text, remedy, "warning" if large and parts else "note", known)

    def _of_rates(self, iteration: int) -> Iterator[Violation]:
        """Yield what is said of learning rates that are all zero from the first check on."""
        rates = [group.get("lr", 1.0) for optimizer in self._optimizers for group in optimizer.param_groups]
        are_zero = not any(isinstance(rate, torch.Tensor) or rate != 0.0 for rate in rates)
        self._zero_rates = self._zero_rates + 1 if are_zero and self._zero_rates == self._checks - 1 else -1
        if self._zero_rates == 2:
            yield Violation(
                "never-updated",
                f"all learning rates are 0 at steps 10 to {iteration:,}: nothing is trained.",
                "Look at the learning-rate schedule, such as an integer division or a warm-up that is never advanced.",
            )


def _copied(samples: list[_Sample]) -> list[_Sample]:
    """Return samples with copies of their values, made by one op for each kind."""
    of_kinds: dict[tuple[torch.device, torch.dtype], list[_Sample]] = {}
    for each in samples:
        of_kinds.setdefault((each.values.device, each.values.dtype), []).append(each)
    for of_kind in of_kinds.values():
        values = [each.values for each in of_kind]
        copies = torch.cat(values).split_with_sizes([len(value) for value in values])
        for each, copy in zip(of_kind, copies, strict=True):
            each.values = copy
    return samples


def _flags(samples: list[_Sample], now: list[torch.Tensor], gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return for each sample of a kind whether it has changed, and whether a step would change it; shape (samples, 2).

    A step is taken with the gradient of now.
    """
    values, first = torch.cat([each.values for each in samples]), samples[0]
    gradient = torch.cat(gradients).to(values.dtype)
    if first.optimizer is None:
        would_differ = gradient != 0
    else:
        size = _OF_LR * gradient.sign() if first.is_adaptive else gradient
        would_differ = (values + size * first.lr != values) & gradient.isfinite()
    both = torch.stack([torch.cat(now) != values, would_differ])
    return torch.stack([part.any(1) for part in both.split_with_sizes([len(each) for each in now], 1)])


def _can_compare(param: torch.Tensor) -> bool:
    gradient = param.grad
    return (
        param.requires_grad
        and gradient is not None
        and param.is_floating_point()
        and param.layout is torch.strided
        and gradient.layout is torch.strided
        and not param.is_meta
        # Under tensor parallelism a gradient may be split otherwise, or be partial sums.
        and getattr(gradient, "placements", None) == getattr(param, "placements", None)
    )


def _sample(tensor: Any) -> torch.Tensor:
    """Return some of this rank's elements, from all columns of a large matrix."""
    local: torch.Tensor = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    flat: torch.Tensor = local.flatten()
    return flat[:: local.numel() // _SAMPLED | 1]


def _in_plain_containers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters of modules, and parameters, in lists, tuples and dicts that are attributes of modules."""
    for prefix, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            items: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                name = ".".join(filter(None, [prefix, f"{attribute}[{key!r}]"]))
                if isinstance(item, nn.Parameter):
                    yield name, item
                elif isinstance(item, nn.Module):
                    yield from ((f"{name}.{own}", param) for own, param in item.named_parameters())


def _all_optimizers() -> list[torch.optim.Optimizer]:
    """Return all optimizers of the process."""
    return [each for each in instances_of(torch.optim.Optimizer) if "param_groups" in vars(each)]


def _whole_parts(names: Sequence[str], parameters: Named) -> set[str]:
    """Return the children of the model of which all trainable parameters are among those named."""
    trainable = [name for name, param in parameters.items() if param.requires_grad]
    parts = {name.partition(".")[0] for name in names if "." in name}
    return {part for part in parts if all(name in names for name in trainable if name.startswith(f"{part}."))}
