"""`compare`: how precisions change a model's loss, gradients and module outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from castwise._notebook import notebook_progress
from castwise._recipes.recipe import RECIPES, labelled
from castwise._suggestions import listed, nearest
from castwise._torch_private import (
    is_compiled,
    is_fsdp_flattened,
    no_gradient_hooks,
    tree_leaves,
    wraps_compiled,
)
from castwise.amp._devices import has_autocast
from castwise.amp._emulation import SETTLED, is_native_here
from castwise.amp.autocast_mode import autocast
from castwise.comparison._call_again import forgetting_graph
from castwise.comparison._callables import EAGER, ModuleAlone, as_it_runs, is_compared, modules_alone, which_is_closer
from castwise.comparison._drift import Drift, ModuleDrift, PolicyDrift, Summary
from castwise.comparison._errors import ErrorSums, local, real
from castwise.comparison._interrupts import Interrupts
from castwise.comparison._kept_values import attributes_of
from castwise.comparison._log_probs import LogProbSums, token_log_probs
from castwise.comparison._objective import Forward, Loss, Objective, Progress, first_line, fresh, is_out_of_memory
from castwise.comparison._policy_run import ModuleSums, PolicyRun
from castwise.comparison._precisions import Precision, is_sharded, scaled, temporarily_bound
from castwise.comparison._reference_run import Call, Gradients, ReferenceRun, Written
from castwise.comparison._starting_point import StartingPoint
from castwise.comparison._watched_calls import Tap, Watch
from castwise.diagnosis._diagnosis import diagnose
from castwise.diagnosis._replay import gradients_of, has_reentrant_checkpoint, unchanged
from castwise.policy._bound_policy import BoundPolicy
from castwise.policy._module_rules import decide, named_modules
from castwise.policy._policy import Policy

Reference = Literal["float32", "float64"] | Policy | BoundPolicy
Vary = Literal["batch_size", "batch_order"]
Compared = Policy | BoundPolicy | Callable[..., Any]
"""What is compared with the reference: a policy, or a callable that takes the model's place."""

_REFERENCES = {"float32": torch.float32, "float64": torch.float64}
_VARY = ("batch_size", "batch_order")
CLIP_BAND = (0.8, 1.2)
_MOST_NOISE = 0.01
_NOTED_MODULES = 5
_NO_GRADIENT = "has an unknown effect: the loss has no gradient"
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class NonfiniteReferenceError(ValueError):
    """Raised if the loss of a batch is not finite in the reference, so nothing can be compared with it."""


def compare(
    model: nn.Module,
    batches: Sequence[Any],
    policies: Mapping[str, Compared] | None = None,
    *,
    loss: Loss | None = None,
    forward: Forward | None = None,
    reference: Reference | None = None,
    gradients: bool = True,
    vary: Vary | None = None,
    clip_band: tuple[float, float] = CLIP_BAND,
) -> Drift:
    """Run batches under policies and under a reference, and return their differences, module by module.

    The *effect* of a module is the root mean square of (gradient of the loss with respect to its outputs x error that
    it introduces into them). It estimates how its rounding changes the loss. The gradient is the reference's. The
    *introduced* error is the difference between two runs of the module's own ops, under the policy and in the
    reference, on the same values: the reference's, rounded to the dtypes in which the policy passes them on. Errors of
    submodules are not included. The rest of a module's output error under the policy is *carried*: it comes from its
    inputs.

    Errors of weight gradients are split in the same way: *introduced* errors come from the module's own ops, forward
    and backward, on the reference's values and output gradients.

    Per policy, a batch costs one forward and backward, another forward, and up to four forwards and two backwards of
    each module in isolation. The reference costs one forward and backward, and in fp16 another one to find a loss
    scale. Module outputs are kept in memory for one run at a time, the reference's.

    Weights, buffers, gradients (the same tensors), forwards and training flags of modules, tensors of the batches and
    random states are restored, even after an exception or Ctrl-C; weights are copied for this. Not restored are other
    attributes that the forward sets, side effects of hooks and `loss`, and the program's own generators. Dropout draws
    the same random numbers in all runs. Compiled modules run eagerly.

    Args:
        model: The model, in training or evaluation mode. Each rank compares on its own, whether DDP wraps the model or
            it consists of FSDP2 units; with FSDP2, a rank compares its own shards of the gradients.
        batches: A list of `(inputs, targets)`. The inputs are a tensor, a tuple of positional arguments, or a mapping
            of keyword arguments for the model.
        policies: Policies, bound or not, by names of your choice; or callables that are called instead of the model,
            such as `torch.compile(model)`. A callable runs as it is, without hooks and in no region, beside the eager
            model, which gets a row of its own, "eager". Each module is also compiled by itself, as a compiled model
            was, and run on inputs of the eager model in the first batch. Optional with `vary`.
        loss: Computes the loss, a tensor of one element, from the model's output and the targets, in the policy's
            region.
        forward: Instead of `loss`, for other batches: computes the loss from the model and a batch.
        reference: "float32", with autocast off; "float64", which also casts weights, buffers and inputs; or a policy.
            By default "float64" if there are callables, else "float32". Regions in the model's own code apply in the
            reference, too. The first two compute in full fp32, without TF32 or bf16 products, whatever the program has
            set (`torch.set_float32_matmul_precision`, `torch.backends.*.fp32_precision`, `allow_tf32`). Policies
            compute with the program's settings. These belong to the process, so other threads compute in full fp32
            while a reference runs.
        gradients: False skips the backwards of the policies and of isolated modules.
        vary: Also compare the reference with itself, with the samples of a batch one by one ("batch_size") or in
            another order ("batch_order"). Errors below this noise are not caused by a policy. Raises if the forward
            draws random numbers.
        clip_band: The smallest and largest ratio of probabilities for `LogProbDrift.outside_band`.

    Returns:
        Figures by policy and module; `print` shows them as tables.

    Raises:
        TypeError: An argument has the wrong type, or a module returns a generator.
        ValueError: A policy does not fit the model, `reference` or `vary` is unknown, the model is wrapped in
            `FullyShardedDataParallel`, `vary` was given and the forward draws random numbers, or the loss is not finite
            in the reference (the message includes the diagnosis).

    Example:
        >>> import castwise
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        >>> batch = torch.randn(32, 8), torch.randint(4, (32,))
        >>> drift = castwise.compare(model, [batch], {"bf16": castwise.policies.bf16}, loss=nn.functional.cross_entropy)
        >>> drift["bf16"].modules[0].name
        '2'
    """
    given = policies or {}
    if reference is None:
        has_calls = isinstance(given, Mapping) and any(map(_is_call, given.values()))
        reference = "float64" if has_calls else "float32"
    comparison = Comparison(model, loss, forward, reference, gradients, vary, clip_band)
    with notebook_progress() as progress:
        return comparison.drift(batches, given, progress)


def _is_call(value: object) -> bool:
    return callable(value) and not isinstance(value, (Policy, BoundPolicy, type))


def unwrapped(model: Any) -> nn.Module:
    """Return a model without the wrappers of `torch.compile` and DDP."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, _WRAPPERS):
        return unwrapped(model.module)
    return unwrapped(next(model.children())) if wraps_compiled(model) else model


def checked_band(clip_band: Any) -> tuple[float, float]:
    """Return a band of ratios.

    Raises:
        TypeError: It is not a pair of numbers.
        ValueError: They are not ascending, or negative.
    """
    is_pair = isinstance(clip_band, (tuple, list)) and len(clip_band) == 2
    if not (is_pair and all(isinstance(bound, (int, float)) for bound in clip_band)):
        raise TypeError(f"clip_band must be two ratios such as {CLIP_BAND}, got {clip_band!r}")
    low, high = clip_band
    if not 0 <= low < high:
        raise ValueError(f"clip_band must be two ratios, 0 <= low < high, got {clip_band!r}")
    return low, high


def device_of(model: nn.Module) -> str:
    """Return the type of the device of a model's parameters."""
    return next((param.device.type for param in model.parameters()), "cpu")


@dataclass
class _Variant:
    """What to compare with the reference: a policy, or the reference itself with other batches."""

    name: str
    precision: Precision
    policy: Policy | None
    sums: dict[Tap, ModuleSums]
    log_probs: LogProbSums
    losses: list[float] = field(default_factory=list)
    gradients: ErrorSums = field(default_factory=ErrorSums)
    outputs: ErrorSums = field(default_factory=ErrorSums)  # of a callable; modules have their own sums
    loss_scale: float = math.inf  # the smallest that a batch needed
    vary: str | None = None
    problem: str = ""
    call: Callable[..., Any] | None = None
    is_detached: bool = False  # a callable whose loss has no gradient by the model's weights
    alone: tuple[ModuleAlone, ...] = ()

    def parts(self, size: int) -> list[torch.Tensor]:
        """Return the sample indices of each run."""
        if self.vary == "batch_size":
            return [torch.tensor([sample]) for sample in range(size)]
        return [torch.arange(size).flip(0)]


class Comparison:
    """A comparison of a model; takes the arguments of `compare`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        forward: Forward | None,
        reference: Reference = "float32",
        gradients: bool = True,
        vary: str | None = None,
        clip_band: tuple[float, float] = CLIP_BAND,
    ) -> None:
        self.model = unwrapped(model)
        if any(map(is_fsdp_flattened, self.model.parameters())):
            raise ValueError(
                "the weights of the model are flattened by FullyShardedDataParallel, so modules do not have their own "
                "gradients: use fully_shard, or give the model before it is wrapped"
            )
        self._objective = Objective(self.model, loss, forward)
        self._is_compiled = any(map(is_compiled, [*model.modules()]))
        if vary is not None and vary not in _VARY:
            raise ValueError(f"vary must be one of {listed(_VARY)}, or None, got {vary!r}{nearest(str(vary), _VARY)}")
        is_named = isinstance(reference, str) and reference in _REFERENCES
        if not is_named and not isinstance(reference, (Policy, BoundPolicy)):
            near = nearest(reference, _REFERENCES) if isinstance(reference, str) else ""
            raise ValueError(f"reference must be one of {listed(_REFERENCES)}, or a policy, got {reference!r}{near}")
        self._reference, self._with_gradients, self._vary = reference, gradients, vary
        self._band = checked_band(clip_band)
        self.device = device_of(self.model)
        self.interrupts = Interrupts()

    def drift(self, batches: Any, policies: Mapping[str, Compared], progress: Progress | None = None) -> Drift:
        """Compare batches under policies.

        Args:
            batches: See `compare`.
            policies: See `compare`.
            progress: Called with the name of the current phase, the number of steps done, and their total.
        """
        checked = self._objective.check(batches)
        self._check(policies)
        with self._prepared(checked, policies) as (watch, reference, variants):
            steps, reference_losses = len(checked) * len(variants), []
            for number, batch in enumerate(checked):
                with watch:
                    one = _OneBatch(
                        self._objective,
                        watch,
                        self.device,
                        reference,
                        batch,
                        gradients=self._with_gradients,
                        keeps_outputs=any(variant.call is not None for variant in variants),
                    )
                    reference_losses.append(one.run_reference(number, self._vary))
                    for index, variant in enumerate(variants):
                        if progress is not None:
                            progress("batches", number * len(variants) + index, steps)
                        with self._refusals_noted(variant, variants):
                            one.run_beside(variant)
                    one.run_backward(variants)
                for variant in variants:
                    self.interrupts.let_through()
                    with self._refusals_noted(variant, variants):
                        if variant.call is not None:
                            one.run_call(variant)
                        elif self._with_gradients:
                            one.add_gradients(variant)
            for variant in variants:
                if variant.call is not None and not variant.problem:
                    variant.alone = modules_alone(
                        variant.call, self._objective, checked[0], self.device, watch, progress
                    )
            if progress is not None:
                progress("batches", steps, steps)
        return self._results(variants, watch, reference_losses, batches=len(checked))

    def _results(self, variants: list[_Variant], watch: Watch, reference_losses: list[float], *, batches: int) -> Drift:
        drifts = [self._of(variant, reference_losses, watch) for variant in variants]
        noise = drifts.pop() if self._vary is not None else None
        return Drift(
            policies={drift.name: drift for drift in drifts},
            reference=self._reference if isinstance(self._reference, str) else "policy",
            batches=batches,
            noise=noise,
            not_called=tuple(tap.name for tap in watch.taps if variants[0].sums and _is_left_out(tap, variants)),
            notes=(
                *(f"{drift.name}: {drift.failure}" for drift in drifts if drift.failure),
                *self._notes(variants),
                *_notes_of_calls(variants),
                *_notes_of_noise(noise),
            ),
        )

    def _check(self, policies: object) -> None:
        if not isinstance(policies, Mapping):
            raise TypeError(f'policies must be a mapping such as {{"bf16": policy}}, got {type(policies).__name__}')
        for name in policies:
            if not isinstance(name, str):
                raise TypeError(f"names of policies must be strings, got {name!r}")
        if self._vary in policies:
            raise ValueError(f"policies[{self._vary!r}] has the name of the noise of vary={self._vary!r}: rename it")
        if not policies and self._vary is None:
            raise ValueError("policies must have at least one policy, got none")

    @contextmanager
    def _refusals_noted(self, variant: _Variant, variants: list[_Variant]) -> Iterator[None]:
        """Record that a policy cannot run, for example for lack of a kernel; raise if no policy is left."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) or variant.vary:
                raise
            variant.problem = f"cannot be run: {first_line(error)}"
            if all(variant.problem for variant in variants):
                raise

    @contextmanager
    def _prepared(
        self, batches: list[Any], policies: Mapping[str, Compared]
    ) -> Iterator[tuple[Watch, Precision, list[_Variant]]]:
        """Bind the policies that are not bound, and restore everything afterwards."""

        def bound(policy: Any, name: str) -> BoundPolicy:
            if isinstance(policy, BoundPolicy):
                policy.check_is_bound()
                if not policy.is_on(self.model):
                    raise ValueError(f"{name} is bound to another model: give its policy, or bind it to this model")
                return policy
            if not isinstance(policy, Policy):
                raise TypeError(f"{name} must be a castwise.Policy, bound or not, got {type(policy).__name__}")
            return stack.enter_context(temporarily_bound(policy, self.model))

        with ExitStack() as stack:
            stack.enter_context(self.interrupts)
            if isinstance(self._reference, (Policy, BoundPolicy)):
                reference = Precision(self.device, bound(self._reference, "reference"))
            else:
                reference = Precision(self.device, dtype=_REFERENCES[self._reference])
            if reference.dtype is not None and not reference.changes(self.model):
                is_wide = reference.dtype is torch.float64  # casts inputs even if the model has no weights
                reference.dtype = reference.dtype if is_wide else None
            if reference.dtype is not None and is_sharded(self.model):
                raise ValueError(
                    f"reference={self._reference!r} casts weights, which is not possible for FSDP2 units: give a "
                    "policy, or shard weights in float32 and compare with float32"
                )
            calls: dict[str, Any] = {name: call for name, call in policies.items() if _is_call(call)}
            variants = [
                self._variant(name, Precision(self.device, bound(policy, f"policies[{name!r}]")))
                for name, policy in policies.items()
                if name not in calls
            ]
            if calls and EAGER not in policies:
                calls = {EAGER: self.model, **calls}
            as_it_is = Precision(self.device)
            variants += [
                _Variant(name, as_it_is, None, {}, LogProbSums(self._band), call=calls[name]) for name in calls
            ]
            if self._vary is not None:
                variants.append(self._variant(self._vary, reference, self._vary))
            with restored(self.model, batches):
                yield Watch(self.model, self.interrupts.let_through), reference, variants

    def _variant(self, name: str, precision: Precision, vary: str | None = None) -> _Variant:
        policy = None if vary or precision.bound is None else precision.bound.policy
        return _Variant(name, precision, policy, {}, LogProbSums(self._band), vary=vary)

    def _of(self, variant: _Variant, reference_losses: list[float], watch: Watch) -> PolicyDrift:
        policy = variant.policy
        if variant.problem:
            summary = Summary(math.nan, mean(reference_losses), math.nan, None, None, None, 1.0, None)
            return PolicyDrift(variant.name, policy, summary, (), variant.problem)
        decisions = [] if policy is None else decide(policy, self.model)
        computes = {decision.name: decision.recipe or decision.compute for decision in decisions}
        reference = str(self._reference) if policy is None else ""
        modules = [
            _module_drift(tap, index, sums, computes.get(tap.name, reference))
            for index, (tap, sums) in enumerate(_in_order(variant.sums, watch))
            if sums.calls
        ]
        pairs = list(zip(variant.losses, reference_losses, strict=True))
        compared = variant.gradients.elements > 0
        summary = Summary(
            loss=mean(variant.losses),
            reference_loss=mean(reference_losses),
            relative_loss_error=mean([relative_loss_error(loss, expected) for loss, expected in pairs]),
            gradient_cosine=variant.gradients.cosine() if compared else None,
            gradient_norm_ratio=variant.gradients.norm_ratio() if compared else None,
            gradient_errors=variant.gradients.errors(),
            loss_scale=variant.loss_scale if math.isfinite(variant.loss_scale) else 1.0,
            log_probs=variant.log_probs.drift(),
            loss_error=mean([_loss_error(loss, expected) for loss, expected in pairs]),
            output_errors=next((module.total for module in modules if not module.name), variant.outputs.errors()),
        )
        modules.sort(
            key=lambda module: (-math.inf if module.effect is None else module.effect, -module.place), reverse=True
        )
        return PolicyDrift(variant.name, policy, summary, tuple(modules), alone=variant.alone)

    def _notes(self, variants: list[_Variant]) -> Iterator[str]:
        if self._is_compiled and any(variant.call is None for variant in variants):
            yield "compiled modules ran eagerly"
        scripted = [
            name or "(root)" for name, module in named_modules(self.model) if isinstance(module, torch.jit.ScriptModule)
        ]
        if scripted:
            more = len(scripted) - _NOTED_MODULES
            rest = f" and {more:,} more" if more > 0 else ""
            yield f"{', '.join(scripted[:_NOTED_MODULES])}{rest}: compiled by torch.jit, so without separate figures"
        if any(sums.lacks_gradient == _NO_GRADIENT for other in variants for sums in other.sums.values()):
            yield "the loss has no gradient, so effects are unknown"
        for variant in variants:
            if variant.problem:
                continue
            for dtype in [] if variant.precision.bound is None else variant.precision.bound.low_precisions:
                if self.device == "cpu" and is_native_here(dtype) is False:
                    name = str(dtype).removeprefix("torch.")
                    yield f"{variant.name}: this CPU has no units for {name}, which is emulated"
            if (bound := variant.precision.bound) is not None:
                for recipe in bound.recipes:
                    if labelled(RECIPES[recipe], bound.policy.backend, self.device).endswith("(emulated)"):
                        yield f"{variant.name}: {recipe} is emulated"
            names: dict[str, list[str]] = {}
            for tap, sums in variant.sums.items():
                if sums.problem or sums.lacks_gradient not in ("", _NO_GRADIENT):
                    names.setdefault(sums.problem or sums.lacks_gradient, []).append(tap.name or "(root)")
            for problem, affected in names.items():
                more = len(affected) - _NOTED_MODULES
                rest = f" and {more:,} more" if more > 0 else ""
                prefix = "" if len(affected) == 1 else "each of "
                yield f"{variant.name}: {prefix}{', '.join(affected[:_NOTED_MODULES])}{rest} {problem}"


class _OneBatch:
    """The runs of one batch."""

    def __init__(
        self,
        objective: Objective,
        watch: Watch,
        device: str,
        reference: Precision,
        batch: Any,
        *,
        gradients: bool,
        keeps_outputs: bool,
    ) -> None:
        self._objective, self._watch, self._device, self._reference = objective, watch, device, reference
        self._batch, self._with_gradients, self._keeps_outputs = batch, gradients, keeps_outputs
        self._start = StartingPoint(objective.model)
        self._runs: list[tuple[_Variant, list[PolicyRun]]] = []
        self._gradients: list[torch.Tensor | None] = []
        self._params = [param for param in objective.model.parameters() if param.requires_grad]
        self._introduced_gradients: dict[str, dict[torch.Tensor, torch.Tensor]] = {}

    def run_reference(self, number: int, vary: str | None = None) -> float:
        """Run the forward of the reference, and return its loss.

        Args:
            number: Index of the batch.
            vary: See `compare`; raises if random numbers are drawn.
        """
        self._scale = 1.0
        precision = self._reference
        if self._params and precision.loss_scale > 1.0:  # found now: the backward for the effects runs only once
            _, self._scale = scaled(lambda scale: self._gradients_of(precision, scale), precision.loss_scale)
        self._run = self._forward_of_reference({})
        written = self._run.overwritten()
        # In training, a reentrant checkpoint whose inputs require no gradient gives its weights none either, so inputs
        # must not require one here.
        adds_gradients = not (self._params and self._run.sources and has_reentrant_checkpoint([self._loss]))
        if written or not adds_gradients:  # known only after a forward
            self._run = self._forward_of_reference(written, adds_gradients)
        if vary is not None and self._start.has_drawn():
            names = [name or "(root)" for name in self._run.drawing()]
            raise ValueError(
                f"vary={vary!r} regroups the samples of a batch, so they would get other random numbers from "
                f"{listed(names) if names else 'the forward'}: call model.eval() first, or leave out vary"
            )
        loss = float(self._loss.detach())
        if not math.isfinite(loss):
            del self._run, self._loss
            self._start.restore()
            raise nonfinite_error(self._objective, self._reference, self._batch, number)
        return loss

    def run_beside(self, variant: _Variant) -> None:
        """Run the forward of a variant while the tensors of the reference are in memory."""
        if variant.problem or variant.call is not None:
            return
        self._start.restore()
        precision, runs = variant.precision, []
        precision.renew_buffers()
        for tap in self._watch.taps:
            variant.sums.setdefault(tap, ModuleSums())
        batch = fresh(self._batch, precision.cast)
        size = self._objective.size_of(batch) if variant.vary else 0
        introduced = None
        if self._with_gradients and not variant.vary and not is_sharded(self._objective.model):
            introduced = self._introduced_gradients.setdefault(variant.name, {})

        def handler(part: torch.Tensor | None = None) -> AbstractContextManager[None]:
            selection = None if part is None else (part, size)
            precisions = self._reference, precision
            run = PolicyRun(
                *(self._watch, self._run, precisions, self._device, variant.sums, introduced, selection, self._scale)
            )
            runs.append(run)
            return self._watch.handling(run.call)

        graph = nullcontext() if self._run.runs_backwards else forgetting_graph()
        with precision.weights(self._objective.model), precision.region(), torch.enable_grad(), graph:
            if not variant.vary:
                with handler():
                    outputs, loss = self._objective(batch)
            else:
                outputs, loss = self._objective.in_parts(batch, variant.parts(size), size, handler)
        variant.losses.append(float(loss.detach()))
        self._add_log_probs(variant, outputs)
        self._runs.append((variant, runs))

    def run_backward(self, variants: list[_Variant]) -> None:
        """Run the backward of the reference, and add up effects as gradients arrive."""
        run, loss = self._run, self._loss
        if self._scale > 1.0:
            loss = loss.float() * self._scale

        def on_gradients(call: Call, gradients: Gradients) -> None:
            gradients = {site: _unscaled(gradient, self._scale) for site, gradient in gradients.items()}
            for _, runs in self._runs:
                for policy_run in runs:
                    policy_run.add_effect(call, gradients)

        run.on_gradients = on_gradients
        run.calls.clear()
        params = [self._reference.weight(param) for param in self._params]
        if loss.requires_grad and (params or run.sources):
            with self._reference.weights(self._objective.model), self._watch.handling(run.call):
                gradients = _gradients(loss, [*params, *run.sources])
                run.end_backward()
            self._gradients = [
                None if gradient is None else _unscaled(gradient, self._scale) for gradient in gradients[: len(params)]
            ]
            for _, runs in self._runs:
                for policy_run in runs:
                    policy_run.note_missing_gradients()
        elif not loss.requires_grad:
            for variant in variants:
                for sums in variant.sums.values():
                    sums.lacks_gradient = _NO_GRADIENT
        del self._run, self._loss
        self._runs.clear()

    def run_call(self, variant: _Variant) -> None:
        """Run a callable instead of the model, and compare its loss and gradients with the reference's."""
        if variant.problem:
            return
        self._start.restore()
        objective, batch = self._objective.calling(variant.call), fresh(self._batch, variant.precision.cast)
        with variant.precision.region(), torch.enable_grad(), as_it_runs(variant.call):
            outputs, loss = objective(batch)
        variant.losses.append(float(loss.detach()))
        self._add_log_probs(variant, outputs)
        found = _compared_outputs(outputs)
        if [leaf.shape for leaf in found] == [leaf.shape for leaf in self._outputs]:
            for expected, got in zip(self._outputs, found, strict=True):
                variant.outputs.add(expected, got)
        if not self._with_gradients or all(gradient is None for gradient in self._gradients):
            return
        gradients = _gradients(loss, [*self._params]) if loss.requires_grad else []
        is_detached = all(gradient is None for gradient in gradients)
        variant.is_detached = is_detached and not variant.gradients.elements  # in no batch so far
        for pair in [] if is_detached else zip(self._gradients, gradients, strict=True):
            if (comparable := _comparable(*pair, 1.0)) is not None:
                variant.gradients.add(*comparable)

    def _add_log_probs(self, variant: _Variant, outputs: Any) -> None:
        expected = self._log_probs
        if expected is not None:
            log_probs = token_log_probs(outputs, self._batch[1])
            if log_probs is not None and log_probs.shape == expected.shape:
                variant.log_probs.add(log_probs, expected)

    def add_gradients(self, variant: _Variant) -> None:
        """Run the forward and backward of a variant, and compare the gradients of the weights."""
        if variant.problem or not self._params or not any(gradient is not None for gradient in self._gradients):
            return
        precision = variant.precision
        gradients, scale = scaled(lambda scale: self._gradients_of(precision, scale, variant), precision.loss_scale)
        variant.loss_scale = min(scale, variant.loss_scale)
        introduced = self._introduced_gradients.pop(variant.name, None)
        owners: dict[torch.Tensor, list[ModuleSums]] = {}
        for tap, sums in variant.sums.items():
            for param in tap.module.parameters(recurse=False):
                owners.setdefault(param, []).append(sums)
        for param, reference_gradient, gradient_of_variant in zip(
            self._params, self._gradients, gradients, strict=True
        ):
            pair = _comparable(reference_gradient, gradient_of_variant, scale)
            if pair is None:
                continue
            expected, got = pair
            variant.gradients.add(expected, got)
            own = expected if introduced is None or param not in introduced else expected + introduced[param]
            for sums in owners.get(param, ()):
                sums.gradients.add(expected, got)
                if introduced is not None:
                    sums.introduced_gradients.add(expected, own)
                    sums.carried_gradients.add_rest(expected, got, expected, own)

    def _gradients_of(
        self, precision: Precision, scale: float, variant: _Variant | None = None
    ) -> list[torch.Tensor | None]:
        self._start.restore()
        model = self._objective.model
        precision.renew_buffers()
        batch = fresh(self._batch, precision.cast)
        parts = None
        if variant is not None and variant.vary:
            size = self._objective.size_of(batch)
            parts = variant.parts(size)
        with precision.weights(model):
            with precision.region(), torch.enable_grad():
                if parts is not None:
                    _, loss = self._objective.in_parts(batch, parts, size)
                else:
                    _, loss = self._objective(batch)
            if not loss.requires_grad:
                return [None] * len(self._params)
            loss = loss.double() if loss.dtype is torch.float64 else loss.float()
            return _gradients(loss * scale, [precision.weight(param) for param in self._params])

    def _forward_of_reference(self, written: Written, adds_gradients: bool = True) -> ReferenceRun:
        self._start.restore()
        self._reference.renew_buffers()
        run = ReferenceRun(self._device, written, adds_gradients)
        batch = fresh(self._batch, self._reference.cast)
        model = self._objective.model
        with (
            self._reference.weights(model),
            self._reference.region(),
            torch.enable_grad(),
            self._watch.handling(run.call),
        ):
            outputs, self._loss = self._objective(batch)
        run.is_over = True
        self._log_probs = None if outputs is None else token_log_probs(outputs, self._batch[1])
        self._outputs = _compared_outputs(outputs) if self._keeps_outputs else []
        return run


def _compared_outputs(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of numbers in a model's outputs, detached."""
    return [local(leaf.detach()) for leaf in tree_leaves(outputs) if is_compared(leaf)]


def nonfinite_error(objective: Objective, reference: Precision, batch: Any, number: int) -> NonfiniteReferenceError:
    """Return the error for a reference loss that is not finite, including the diagnosis.

    Args:
        objective: Computes the loss of a batch.
        reference: The precision of the reference.
        batch: The batch.
        number: Index of the batch.
    """
    start = StartingPoint(objective.model)
    copied = fresh(batch, reference.cast)
    with reference.weights(objective.model), reference.region():
        loss = float(objective(copied)[1].detach())
        text = f"the loss of batches[{number}] is {loss} in the reference, so nothing can be compared with it"
        start.restore()
        copied = fresh(batch, reference.cast)
        if objective.loss is None:
            diagnosis = diagnose(_Called(objective), lambda loss: loss, (copied,))
        else:
            diagnosis = diagnose(objective.model, lambda outputs: objective.loss_of(outputs, copied), copied[0])
    return NonfiniteReferenceError(f"{text}\n{diagnosis}")


class _Called(nn.Module):
    """Wraps a model and its `forward` as a module; names of modules begin with "model."."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.model, self._objective = objective.model, objective

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        return self._objective(batch)[1]


def _gradients(loss: torch.Tensor, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    if all(local(param) is param for param in params):
        return gradients_of([(loss, None)], params)
    # The sharded weights of FSDP2 units are not in the graph; they get their gradients at the end of a backward.
    for param in params:
        param.grad = None
    with no_gradient_hooks(params, only_after=True):
        torch.autograd.backward(loss)
    return [param.grad for param in params]


def _unscaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """Divide a gradient by the loss scale, in a dtype in which it does not underflow."""
    return gradient if scale == 1.0 or gradient.layout is not torch.strided else _widened(gradient) / scale


def _widened(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.is_complex() or gradient.dtype is torch.float64 else gradient.float()


def _comparable(
    expected: torch.Tensor | None, gradient: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the reference's gradient and the unscaled other one in a common dtype; None if there is neither."""
    # A missing gradient counts as zeros: under plain gradient descent both leave the weight unchanged.
    expected = torch.zeros_like(gradient) if expected is None and gradient is not None else expected
    gradient = torch.zeros_like(expected) if gradient is None and expected is not None else gradient
    if (
        expected is None
        or gradient is None
        or expected.layout is not torch.strided
        or gradient.layout is not torch.strided
    ):
        return None
    expected, gradient = real(local(expected)), real(local(gradient))
    wide = torch.float64 if torch.float64 in {expected.dtype, gradient.dtype} else torch.float32
    return expected.to(wide), gradient.to(wide) / scale


def _module_drift(tap: Tap, place: int, sums: ModuleSums, computes_in: str) -> ModuleDrift:
    """Return the figures of a module."""
    splits = sums.is_split and not sums.problem
    return ModuleDrift(
        name=tap.name,
        type=type(tap.module).__name__,
        place=place,
        calls=sums.calls,
        computes_in=computes_in,
        effect=None if sums.problem or sums.lacks_gradient else sums.effect.rms(),
        loss_shift=None if sums.problem or sums.lacks_gradient else sums.effect.root(),
        introduced=None if sums.problem else sums.introduced.errors(),
        carried=None if sums.problem else sums.carried.errors(),
        total=sums.total.errors(),
        gradients=sums.gradients.errors(),
        introduced_gradients=sums.introduced_gradients.errors() if splits else None,
        carried_gradients=sums.carried_gradients.errors() if splits else None,
        problem=sums.problem or sums.lacks_gradient,
        returns=", ".join(str(dtype).removeprefix("torch.") for dtype in sums.returned),
    )


def _in_order(sums: dict[Tap, ModuleSums], watch: Watch) -> list[tuple[Tap, ModuleSums]]:
    return [(tap, sums[tap]) for tap in watch.taps if tap in sums]


def _is_left_out(tap: Tap, variants: list[_Variant]) -> bool:
    """Return True if a module has a forward that was never called."""
    has_forward = type(tap.module).forward is not nn.Module.forward
    return has_forward and not any(tap in variant.sums and variant.sums[tap].calls for variant in variants)


def _notes_of_noise(noise: PolicyDrift | None) -> Iterator[str]:
    # Rounding alone never differs this much; a loss that sums over samples instead of averaging does.
    if noise is not None and not noise.summary.relative_loss_error <= _MOST_NOISE:
        yield (
            f"{noise.name}: the loss of a batch is not the mean of the losses of its samples (as with a sum, a mean "
            "over tokens, or batch norm in training), so these errors of loss and gradients are not rounding noise"
        )


def _notes_of_calls(variants: list[_Variant]) -> Iterator[str]:
    eager = [variant for variant in variants if variant.call is not None and variant.name == EAGER]
    for variant in variants:
        if variant.is_detached:
            yield (
                f"{variant.name}: its loss has no gradient with respect to the model's weights (its output is detached "
                "or comes from other weights), so its gradients are not known"
            )
        if eager and variant.call is not None and variant is not eager[0] and not variant.problem:
            yield from which_is_closer(variant.name, variant.gradients.errors(), eager[0].gradients.errors())


def mean(values: Sequence[float]) -> float:
    """Return the mean of numbers; NaN if there are none."""
    return sum(values) / len(values) if values else math.nan


def _loss_error(loss: float, expected: float) -> float:
    return abs(loss - expected) if math.isfinite(loss) else math.inf


def relative_loss_error(loss: float, expected: float) -> float:
    """Return the error of a loss relative to the reference's; inf if the loss is not finite."""
    if not math.isfinite(loss):
        return math.inf
    return abs(loss - expected) / abs(expected) if expected else (0.0 if loss == expected else math.inf)


@contextmanager
def restored(model: nn.Module, batches: list[Any]) -> Iterator[None]:
    """Restore everything that `compare` promises to restore, and suppress warnings about emulated formats."""
    device = device_of(model)
    # Inference tensors cannot be in a graph, and backwards must run outside regions.
    outside = autocast(device, enabled=False) if has_autocast(device) else nullcontext()
    with (
        torch.inference_mode(False),
        outside,
        unchanged(model, batches) as guard,
        _without_warnings_of_emulation(),
    ):
        guard.before_write([param for param in model.parameters() if local(param) is param])
        attributes = [
            (module, vars(module)[name], name) for module in model.modules() for name in attributes_of(module)
        ]
        try:
            yield
        finally:
            for module, value, name in attributes:
                setattr(module, name, value)


@contextmanager
def _without_warnings_of_emulation() -> Iterator[None]:
    """Keep regions from warning about formats that the CPU emulates; the notes report these."""
    before = set(SETTLED)
    try:
        SETTLED.update({torch.float16, torch.bfloat16})
        yield
    finally:
        SETTLED.intersection_update(before)
