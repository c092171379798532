"""One sampled step: measurements on the device, their results on the host, and the record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from types import MappingProxyType

import torch
from torch import nn

from castwise.amp._gradients import params_and_grads
from castwise.monitor import _module_names as names
from castwise.monitor._exponents import Counter, count, tally
from castwise.monitor._host_copies import HostCopies
from castwise.monitor._local_shards import is_partial, local_shard
from castwise.monitor._quantized_layers import QuantizedSample
from castwise.monitor._records import QuantizedLayer, SampleRecord
from castwise.monitor._tally import Tally
from castwise.monitor._updates import Updates, update_of


@dataclass(frozen=True)
class GradientTallies:
    """Statistics of this rank's part of a gradient.

    Args:
        scaled: Tally of the gradient as the backward computed it.
        unscaled: Tally of the gradient divided by the scale.
        distinct: See `_local_shards.LocalShard`.
        squares: Sum of squares of the unscaled gradient.
        shape: Shape of all parts together; None if it is not known.
    """

    scaled: Tally
    unscaled: Tally
    distinct: int | None
    squares: float = 0.0
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Measured:
    """One rank's measurements of a step, on the host.

    Args:
        gradients: Statistics by parameter.
        modules: Names of the parameters that each module owns.
        activations: Tallies by module.
        updates: Results of `_updates.compare` by parameter; empty if the step was skipped.
        quantized: Results of `QuantizedSample.layers` by layer.
        partial_sums: Names of parameters whose gradients are partial sums, which only a collective could complete.
        dtypes: Dtypes of outputs by module; see `Activations.dtypes`.
    """

    gradients: Mapping[str, GradientTallies] = field(default_factory=dict)
    modules: Mapping[str, list[str]] = field(default_factory=dict)
    activations: Mapping[str, Tally] = field(default_factory=dict)
    updates: Mapping[str, list[float]] = field(default_factory=dict)
    quantized: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    partial_sums: Sequence[str] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)


class Sample:
    """Measures one step. Only `measured` syncs with an accelerator.

    Args:
        model: The measured model.
        outputs: Results of `count` for the output tensors of each module.
        quantized: Measurements of layers with recipes, if there are any.
        dtypes: Dtypes of outputs by module; see `Activations.dtypes`.
    """

    def __init__(
        self,
        model: nn.Module,
        outputs: Mapping[str, list[torch.Tensor]],
        quantized: QuantizedSample | None = None,
        dtypes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._model, self._quantized, self._dtypes = model, quantized, dtypes
        self._outputs = HostCopies({(name, i): one for name, counts in outputs.items() for i, one in enumerate(counts)})
        self._parts: dict[str, tuple[int | None, tuple[int, ...] | None]] = {}  # distinct parts, and the shape of all
        self._partial_sums: list[str] = []
        self._is_scaled: dict[str, bool] = {}
        self._gradients: list[HostCopies[tuple[str, bool]]] = []
        self._squares: list[HostCopies[str]] = []
        self._updates = Updates()
        self._updated: dict[torch.optim.Optimizer, HostCopies[torch.Tensor]] = {}

    def measure_gradients(
        self, optimizer: torch.optim.Optimizer, scale: torch.Tensor, *, is_scaled: bool = True
    ) -> None:
        """Count the exponents of an optimizer's gradients after the backward.

        Args:
            optimizer: The optimizer, with gradients from the backward or unscaled by a step that is skipped.
            scale: Scale of the gradients, on their device.
            is_scaled: Whether they are still scaled.
        """
        mantissa = _mantissa(scale) if is_scaled else None
        of_parameter = {parameter: name for name, parameter in names.parameters(self._model).items()}
        counts: dict[tuple[str, bool], torch.Tensor] = {}
        counter, counted = Counter(with_squares=True), list[str]()
        for parameter in params_and_grads(optimizer)[0]:
            name = of_parameter.get(parameter)
            if name is None:  # a parameter of another model
                continue
            if is_partial(parameter.grad):
                self._partial_sums.append(name)
                continue
            part = local_shard(parameter.grad, parameter)
            self._parts[name] = part.distinct, None if part.distinct is None else tuple(parameter.shape)
            self._is_scaled[name] = is_scaled
            counter.add(part.local)
            counted.append(name)
            if mantissa is not None:
                counts[name, False] = count(part.local, mantissa.to(part.local.device))
        squares = {}
        for name, (of_gradient, of_squares) in zip(counted, counter.results(), strict=True):
            assert of_squares is not None
            counts[name, True], squares[name] = of_gradient, of_squares
        self._gradients.append(HostCopies(counts))
        self._squares.append(HostCopies(squares))

    def keep_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy an optimizer's weights before its step."""
        self._updates.keep(optimizer)

    def measure_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare an optimizer's weights after the step with the copies."""
        found = self._updates.compare(optimizer)
        if found:
            self._updated[optimizer] = HostCopies(found)

    def forget_weights(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop the copies of weights for an optimizer that does not step, or for all."""
        self._updates.forget(optimizer)

    def measured(self, scale: float, stepped: Iterable[torch.optim.Optimizer | None]) -> Measured:
        """Return the measurements. Waits for the copies from an accelerator.

        Args:
            scale: Scale of the gradients.
            stepped: The optimizers whose step was not skipped.
        """
        of_parameter = {parameter: name for name, parameter in names.parameters(self._model).items()}
        updates = {
            of_parameter[parameter]: numbers.tolist()
            for optimizer in stepped
            if optimizer in self._updated
            for parameter, numbers in self._updated[optimizer].wait().items()
            if parameter in of_parameter
        }
        activations: dict[str, Tally] = {}
        for (module, _), counts in self._outputs.wait().items():
            activations[module] = activations.get(module, Tally()) + tally(counts)
        gradients = self._gradients_on_host(scale)
        modules = {
            name: [of_parameter[own] for own in module.parameters(recurse=False) if of_parameter[own] in gradients]
            for name, module in names.modules(self._model).items()
        }
        owned = {module: own for module, own in modules.items() if own}
        quantized = {} if self._quantized is None else self._quantized.layers()
        return Measured(gradients, owned, activations, updates, quantized, self._partial_sums, self._dtypes)

    def _gradients_on_host(self, scale: float) -> dict[str, GradientTallies]:
        found = {key: counts for copies in self._gradients for key, counts in copies.wait().items()}
        squares = {name: one.item() for copies in self._squares for name, one in copies.wait().items()}
        gradients = {}
        for name, is_first in found:
            if is_first:
                scaled = tally(found[name, True])
                if not self._is_scaled[name]:
                    # Counted after unscaling, so the scaled tally is the derived one.
                    scaled, unscaled = scaled.divided_by(1.0 / scale), scaled
                elif (name, False) in found:
                    # The mantissa is divided out already; the rest of the scale is a power of two.
                    unscaled = tally(found[name, False]).times_two_to_the(1 - math.frexp(scale)[1])
                else:
                    unscaled = scaled.divided_by(scale)  # exact for a power of two, else to within one exponent
                # Squares contain the scale twice.
                of_all = squares[name] / scale**2 if self._is_scaled[name] else squares[name]
                distinct, shape = self._parts[name]
                gradients[name] = GradientTallies(scaled, unscaled, distinct, of_all, shape)
        return gradients


def sample_record(step: int, scale: float, found: Measured, *, is_clipped: bool = False) -> SampleRecord:
    """Return the record of a sampled step.

    Args:
        step, scale: Number of the step, and its scale.
        found: Measurements of all ranks.
        is_clipped: Whether the step was clipped, so that its step record has the norm.

    Returns:
        grad_norm: The 2-norm of all unscaled gradients together; None if the step was clipped, has no gradients, or has
            some that are partial sums, which are left out.
        gradients, modules: Results of `Tally.stats` by parameter, and for all parameters that a module owns together.
            Magnitudes are unscaled, formats refer to scaled ones. On an accelerator the exponents are accurate to
            within one if the scale is not a power of two (see `Tally.divided_by`); the rest is exact.
        owned: Names of the parameters that each module owns.
        activations: Results of `Tally.stats` for modules' outputs, which are not scaled.
        dtypes: Dtypes of modules' outputs, as torch names them; of those with several, the first.
        weights: Results of `_updates.update_of` by parameter.
        quantized: Results of `QuantizedSample.layers` on rank 0; only if layers have 8-bit or 4-bit recipes.
    """
    gradients = found.gradients
    has_norm = bool(gradients) and not is_clipped and not found.partial_sums
    modules = {}
    for module, own in found.modules.items():
        parts = [gradients[name] for name in own]
        unscaled = reduce(add, (part.unscaled for part in parts))
        modules[module] = unscaled.stats(reduce(add, (part.scaled for part in parts)))
    return SampleRecord(
        step=step,
        scale=scale,
        grad_norm=math.sqrt(sum(part.squares for part in gradients.values())) if has_norm else None,
        gradients={name: part.unscaled.stats(part.scaled) for name, part in gradients.items()},
        modules=modules,
        owned={module: tuple(own) for module, own in found.modules.items()},
        activations={name: outputs.stats() for name, outputs in found.activations.items()},
        dtypes=found.dtypes,
        weights={name: update_of(numbers) for name, numbers in found.updates.items()},
        quantized=found.quantized,
    )


def _mantissa(scale: torch.Tensor) -> torch.Tensor | None:
    """Return scale / 2**floor(log2(scale)), which is in [1, 2), for a second count; None if one count is enough.

    Dividing by a power of two only shifts the exponents, so one count is enough. On an accelerator the host does not
    know the scale, and gradients are always counted once.
    """
    if scale.device.type != "cpu":
        return None
    mantissa = torch.frexp(scale)[0] * 2
    return None if mantissa.item() == 1.0 else mantissa
