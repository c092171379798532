"""`tune`: the cheapest policy that keeps the loss within a tolerance."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from castwise._doctor.speed import GAIN
from castwise._notebook import notebook_progress
from castwise._number_text import several
from castwise._recipes.recipe import RECIPES, labelled
from castwise._suggestions import listed, nearest
from castwise.comparison._call_again import GraphForgottenError, forgetting_graph
from castwise.comparison._drift import Drift
from castwise.comparison._objective import Forward, Loss, Objective, Progress, first_line, fresh, is_out_of_memory
from castwise.comparison._precision_drift import (
    Comparison,
    mean,
    nonfinite_error,
    relative_loss_error,
    restored,
)
from castwise.comparison._precisions import Precision, is_sharded, temporarily_bound
from castwise.comparison._reference_run import Call, ReferenceRun
from castwise.comparison._starting_point import StartingPoint
from castwise.comparison._watched_calls import Tap, Watch
from castwise.policy._module_rules import decide, spelled
from castwise.policy._policy import Policy
from castwise.tuning import _costs as costs
from castwise.tuning._greedy import Choice, Option, path
from castwise.tuning._tuned import Frontier, Point, Tuned

FORMATS = ("float16", "bfloat16", "float32")
Cost = Literal["flops", "bytes", "measured"]
# The budget is counted in forwards of one batch; a backward counts as two. Per module, the search may cost this many
# forwards of each batch (three forwards with backwards), and run at most this many policies on the search batches.
_FORWARDS_FOR_EACH, _RUNS_FOR_EACH = 9, 6
# The largest cost of `compare`: a forward and backward of the reference, and per format a forward and four isolated
# runs of each module.
_OF_REFERENCE, _OF_FORMAT = 3, 5
_FRONTIER_POINTS = 8
_HELD_OUT_RUNS = 16
# Run choices whose expected error is at most this many times the tolerance; for small models, all.
_MARGINS = (1.0, 4.0)
_MOST_CHOICES = 3**9
_DIGITS = {"float32": 23, "float16": 10, "bfloat16": 7}
_DIGITS |= {name: recipe.output[1].numbers.mantissa_bits for name, recipe in RECIPES.items()}


def tune(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Loss | None = None,
    forward: Forward | None = None,
    formats: Sequence[str] = FORMATS,
    tolerance: float = 0.01,
    cost: Cost = "flops",
) -> Tuned:
    """Search for the cheapest policy whose loss is within a tolerance of the loss in float32.

    `compare` first measures how each module's rounding in each format changes the loss. The search then lowers the
    format of one module after another, starting where the most cost is saved per added effect, and runs policies on
    that path. From the cheapest one that keeps the loss, it lowers single modules further as long as the loss is kept.
    Every second batch is held out. If the policy is not within the tolerance on those, the search falls back to another
    policy, or raises modules again.

    The result covers single steps on these batches. It does not show that a long run with the policy ends where one in
    float32 ends: train both for as long as you can afford, and compare.

    Costs at most three forwards and backwards of each batch per module in the search; five if there is only one module
    and its weights have 16 bits. Restores everything that `compare` restores. The result is deterministic, except with
    "measured" costs, which also need some more runs.

    Args:
        model, loss, forward: See `compare`.
        batches: See `compare`. At least two, of which every second one is held out.
        formats: Formats to choose from: "float16", "bfloat16", "float32", and 8-bit and 4-bit recipes for linear layers
            such as "float8_rowwise" (see `Policy`). Recipes are measured with the other modules in "bfloat16", or else
            in the first of the three dtypes that is given.
        tolerance: The largest allowed `|loss - reference loss| / |reference loss|`, averaged over the held-out batches.
        cost: "flops" of matrix products and convolutions, counted half in 16 bits, a quarter in 8, an eighth in 4;
            "bytes" of module outputs and of the weights that modules read; or "measured", the seconds of a forward on
            this machine.

    Returns:
        The policy, its cost and error, and the other policies that were run. If no policy is within the tolerance, the
        one with the least error, with `is_within_tolerance` False. Notes report whether the
        layers with a recipe are faster on this machine than in the surrounding dtype.

    Raises:
        TypeError: See `compare`.
        ValueError: There is only one batch, the model has sharded weights, a format or a cost is unknown, the loss is
            not finite in float32 (the message includes the diagnosis), or there is nothing to choose.

    Example:
        >>> import castwise
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        >>> batches = [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(4)]
        >>> best = castwise.tune(model, batches, loss=nn.functional.cross_entropy, formats=("bfloat16", "float32"))
        >>> best.policy, best.cost
        (Policy(compute='bfloat16', modules={}, ops={}, output=None, in_place='raise', backend='auto'), 0.5)
    """
    search = Search(model, loss, forward, formats, tolerance, cost)
    with notebook_progress() as progress:
        return search.tuned(batches, progress)


class Search:
    """A search for a policy; takes the arguments of `tune`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        forward: Forward | None,
        formats: Sequence[str] = FORMATS,
        tolerance: float = 0.01,
        cost: str = "flops",
    ) -> None:
        self._comparison = Comparison(model, loss, forward, gradients=False)
        self._model, self._device = self._comparison.model, self._comparison.device
        if is_sharded(self._model):
            raise ValueError(
                "model has sharded weights: all ranks must run the same policies, but each rank would search with its "
                "own batches. Tune the model before sharding it, or compare a few policies"
            )
        self._objective = Objective(self._model, loss, forward)
        names = list(formats) if isinstance(formats, Iterable) and not isinstance(formats, str) else []
        known = (*FORMATS, *RECIPES)
        if not names:
            raise ValueError(f"formats must be some of {listed(known)}, got {formats!r}")
        for name in names:
            if name not in known:
                raise ValueError(f"formats must be some of {listed(known)}, got {name!r}{nearest(str(name), known)}")
        dtypes = [name for name in ("bfloat16", *FORMATS) if name in names]
        if not dtypes:
            raise ValueError(
                f"formats must include one of {listed(FORMATS)} for modules without a recipe, got {formats!r}"
            )
        self._around = dtypes[0]
        if cost not in costs.COSTS:
            near = nearest(str(cost), costs.COSTS)
            raise ValueError(f"cost must be one of {listed(costs.COSTS)}, got {cost!r}{near}")
        if set(names) == {"float32"}:
            raise ValueError("formats must include one other than 'float32', or there is nothing to choose")
        if not (isinstance(tolerance, (int, float)) and tolerance is not True and 0 < tolerance < math.inf):
            raise ValueError(f"tolerance must be a finite number > 0, got {tolerance!r}")
        self._formats = list(dict.fromkeys(names))
        self._tolerance, self._kind = float(tolerance), cost
        self._points: dict[Policy, Point] = {}
        self._choices: dict[Policy, Choice] = {}
        self._refusals: list[str] = []
        self._runs_backwards = False
        self._progress: Progress = _no_progress

    def tuned(self, batches: Any, progress: Progress | None = None) -> Tuned:
        """Search with these batches.

        Args:
            batches: See `tune`.
            progress: Called with the name of the current phase, the number of steps done, and their total.
        """
        checked = self._objective.check(batches)
        if len(checked) < 2:
            raise ValueError("batches must have at least two batches, because every second one is held out, got one")
        self._progress = progress or _no_progress
        with self._comparison.interrupts:
            return self._search(checked)

    def _search(self, batches: list[Any]) -> Tuned:
        search, held_out = list(range(0, len(batches), 2)), list(range(1, len(batches), 2))
        called = self._run_reference(batches)
        uniform = {name: self._uniform(name) for name in self._formats}
        drift = self._comparison.drift([batches[number] for number in search], uniform, self._progress)
        self._formats = [name for name in self._formats if not drift[name].problem]
        if self._formats == ["float32"]:
            raise ValueError("; ".join(("the model runs in no format except float32", *drift.notes)))
        with restored(self._model, batches):
            self._batches = batches
            self._options_by_name = options = self._options(drift, search)
            self._option_of = {(name, option.format): option for name, of in options.items() for option in of}
            self._mean_loss = mean([abs(self._reference_losses[number]) for number in search]) or 1.0
            cost_forwards = costs.forwards(self._kind, len(uniform))
            spent = len(batches) + len(search) * (cost_forwards + _OF_REFERENCE + _OF_FORMAT * len(uniform))
            self._forwards = _FORWARDS_FOR_EACH * len(options) * len(batches) - spent
            most = max(_RUNS_FOR_EACH * len(options), 2 * _FRONTIER_POINTS)
            # Reserve half of the remaining budget for the held-out batches.
            self._left = self._total = max(0, min(most, self._forwards // (2 * len(search))))
            for name in self._formats:
                everywhere = {module: name if (module, name) in self._option_of else self._around for module in options}
                self._note(everywhere, drift[name].summary.relative_loss_error)
            choice = self._improved(self._on_the_path(search), search)
            choice, error = self._repaired(choice, search, held_out)
            worth = self._worth_of_recipes(choice, [batches[number] for number in search])
        return self._result(choice, error, drift, called, worth)

    def _run_reference(self, batches: list[Any]) -> set[str]:
        """Compute the loss of each batch in the reference, and return the names of the modules that were called."""
        reference = Precision(self._device, dtype=torch.float32)
        reference.dtype = torch.float32 if reference.changes(self._model) else None
        called: set[str] = set()

        def noting(tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            called.add(tap.name)
            return tap.forward(*args, **kwargs)

        with (
            restored(self._model, batches),
            Watch(self._model, self._comparison.interrupts.let_through) as watch,
            watch.handling(noting),
        ):
            self._reference_losses = [self._loss_in(reference, batch) for batch in batches]
        for number, reference_loss in enumerate(self._reference_losses):
            if not math.isfinite(reference_loss):
                with restored(self._model, batches):
                    raise nonfinite_error(self._objective, reference, batches[number], number)
        return called

    def _result(self, choice: Choice, error: float, drift: Drift, called: set[str], worth: Sequence[str]) -> Tuned:
        policy = self._policy(choice)
        point = self._points[policy]
        never_called = tuple(name for name in drift.not_called if name not in called)
        only_held_out = tuple(name for name in drift.not_called if name in called)
        calls = {module.name for policy_drift in drift for module in policy_drift.modules if module.calls}
        return Tuned(
            policy=policy,
            is_within_tolerance=error <= self._tolerance,
            tolerance=self._tolerance,
            error=error,
            search_error=point.error,
            cost=point.cost,
            cost_kind=self._kind,
            formats=choice,
            frontier=self._frontier(policy),
            drift=drift,
            evaluations=len(self._points),
            not_called=never_called,
            not_tried=tuple(self._not_tried(calls, only_held_out, drift)),
            notes=(*drift.notes, *self._notes(), *worth),
        )

    def _uniform(self, name: str) -> Policy:
        """Return the policy that runs all modules in a format, or all layers that can use it in a recipe."""
        if name in FORMATS:
            return Policy(compute=name)
        return Policy(compute=self._around, modules={f"maybe:{spelled(nn.Linear)}": f"{name}?"})

    def _takers(self, name: str) -> set[str]:
        """Return the names of the modules that can use a recipe."""
        return {decision.name for decision in decide(self._uniform(name), self._model) if decision.recipe}

    def _options(self, drift: Drift, places: list[int]) -> dict[str, list[Option]]:
        """Return each module's options with cost and effect, except modules that cost the same in all formats."""
        module_costs: dict[str, dict[str, float]] = {}
        for number in places:  # a batch may call modules that another one does not
            for tap, format_costs in self._costs(self._batches[number]).items():
                before = module_costs.get(tap.name, {})
                module_costs[tap.name] = {name: before.get(name, 0.0) + cost for name, cost in format_costs.items()}
        self._cost_in_fp32 = {name: costs_by_format["float32"] for name, costs_by_format in module_costs.items()}
        effects = {name: {module.name: module for module in drift[name].modules} for name in self._formats}
        takers = {name: self._takers(name) for name in self._formats if name in RECIPES}
        options = {}
        for module, costs_by_format in module_costs.items():
            is_called = all(module in module_effects for module_effects in effects.values())
            if is_called and len(set(costs_by_format.values())) > 1:
                options[module] = [
                    Option(
                        name,
                        costs_by_format[name],
                        _square(effects[name][module].loss_shift) / drift.batches,
                        _DIGITS[name],
                    )
                    for name in self._formats
                    if module in takers.get(name, [module])
                ]
        if not options:
            raise ValueError(
                f"no module that was called has any {self._kind} to save: give another cost, or other batches"
            )
        return options

    def _costs(self, batch: Any) -> costs.Costs:
        """Return the cost of each module that a batch calls in each format, and in float32."""
        names = list(dict.fromkeys([*self._formats, "float32"]))
        with ExitStack() as stack:
            # Bind before watching: a recipe depends on the module's own forward.
            bound = {name: stack.enter_context(temporarily_bound(self._uniform(name), self._model)) for name in names}
            watch = stack.enter_context(Watch(self._model, self._comparison.interrupts.let_through))
            if self._kind == "flops":
                flops = costs.OwnFlops()
                with flops.counting, watch.handling(flops.call):
                    self._loss(Policy(compute="float32"), batch)
                return costs.of_flops(flops.counts, names)
            precisions = {name: Precision(self._device, taken_by) for name, taken_by in bound.items()}
            calls = self._calls(watch, batch)
            casting = costs.casting(watch, calls, self._device, precisions)
            takers = {name: self._takers(name) for name in names if name in RECIPES}
            casting |= {call.tap for call in calls if any(call.tap.name in taken_by for taken_by in takers.values())}
            if self._kind == "measured":
                by_tap = costs.measured(watch, calls, self._device, precisions)
            else:
                format_costs: dict[str, dict[Tap, float]] = {name: {} for name in names}
                for name, counts in format_costs.items():
                    quantized = dict.fromkeys(takers.get(name, ()), costs.bytes_of_weight(name))
                    with watch.handling(costs.OutputBytes(counts, quantized).call):
                        self._loss(self._uniform(name), batch)
                by_tap = {
                    tap: {name: format_costs[name].get(tap, fp32_cost) for name in names}
                    for tap, fp32_cost in format_costs["float32"].items()
                }
            return {
                tap: tap_costs if tap in casting else dict.fromkeys(names, tap_costs["float32"])
                for tap, tap_costs in by_tap.items()
            }

    def _calls(self, watch: Watch, batch: Any) -> list[Call]:
        """Run the reference, and return its calls."""
        run = ReferenceRun(self._device, {})
        with watch.handling(run.call):
            self._loss(Policy(compute="float32"), batch, forgets_graph=False)
        if written := run.overwritten():
            run = ReferenceRun(self._device, written)
            with watch.handling(run.call):
                self._loss(Policy(compute="float32"), batch, forgets_graph=False)
        return list(run.calls.values())

    def _worth_of_recipes(self, choice: Choice, batches: list[Any]) -> list[str]:
        """Return notes on how fast the chosen recipes are on this machine."""
        notes = []
        for name in [name for name in RECIPES if name in choice.values()]:
            layers = {layer for layer, chosen in choice.items() if chosen == name}
            with ExitStack() as stack:
                policies = {option: self._uniform(option) for option in (name, self._around)}
                bound = {
                    key: stack.enter_context(temporarily_bound(policy, self._model)) for key, policy in policies.items()
                }
                watch = stack.enter_context(Watch(self._model, self._comparison.interrupts.let_through))
                calls: list[Call] = []
                for batch in batches:  # until each layer has been called
                    missing = layers - {call.tap.name for call in calls}
                    calls += [call for call in self._calls(watch, batch) if call.tap.name in missing] if missing else []
                precisions = {key: Precision(self._device, bound_policy) for key, bound_policy in bound.items()}
                seconds = costs.measured(watch, calls, self._device, precisions).values()
            ratio = sum(of[name] for of in seconds) / sum(of[self._around] for of in seconds)
            label = labelled(RECIPES[name], policies[name].backend, self._device)
            time = (
                f"a forward of its {several(len(layers), 'layer')} takes {ratio:.2g} times as long as in {self._around}"
            )
            worth = "is not worth it on this machine" if ratio > 1 / GAIN else "is faster on this machine"
            notes.append(f"{label} {worth}: {time}")
        return notes

    def _policy(self, choice: Choice) -> Policy:
        """Return a choice as a policy: the most common dtype, and rules for modules that do not inherit it."""
        modules = Counter(choice.values())
        dtypes = {self._around, *self._formats} - RECIPES.keys()
        compute = max(dtypes, key=lambda name: (modules[name], -FORMATS.index(name)))
        rules: dict[str, str] = {}
        around: dict[str, str] = {}
        for decision in decide(Policy(compute=compute), self._model):
            outer = around.get(decision.name.rpartition(".")[0], compute) if decision.name else compute
            chosen = choice.get(decision.name, outer)
            around[decision.name] = outer if chosen in RECIPES else chosen
            if chosen != outer:
                rules[decision.name] = chosen
        return Policy(compute=compute, modules=rules)

    def _cost(self, choice: Choice) -> float:
        rest = sum(cost for name, cost in self._cost_in_fp32.items() if name not in choice)
        return (rest + sum(self._option_of[option].cost for option in choice.items())) / sum(
            self._cost_in_fp32.values()
        )

    def _error(self, choice: Choice, places: list[int]) -> float:
        """Return the error of a choice on the search batches, running its policy if it has not run yet."""
        policy = self._policy(choice)
        if policy not in self._points:
            self._left -= 1
            self._progress("policies", self._total - max(self._left, 0), self._total)
            self._note(choice, self._mean_error(policy, places))
        return self._points[policy].error

    def _note(self, choice: Choice, error: float) -> None:
        policy = self._policy(choice)
        self._choices[policy] = choice
        self._points[policy] = Point(self._cost(choice), error, policy)

    def _mean_error(self, policy: Policy, places: list[int]) -> float:
        self._forwards -= len(places)
        try:
            pairs = [(self._loss(policy, self._batches[number]), self._reference_losses[number]) for number in places]
        except Exception as error:  # for example in code that does not accept mixed dtypes
            if is_out_of_memory(error):
                raise
            self._refusals.append(first_line(error))
            return math.inf
        return mean([relative_loss_error(loss, expected) for loss, expected in pairs])

    def _loss(self, policy: Policy, batch: Any, forgets_graph: bool = True) -> float:
        with temporarily_bound(policy, self._model) as bound:
            return self._loss_in(Precision(self._device, bound), batch, forgets_graph)

    def _loss_in(self, precision: Precision, batch: Any, forgets_graph: bool = True) -> float:
        self._comparison.interrupts.let_through()
        start = StartingPoint(self._model)
        forgets_graph = forgets_graph and not self._runs_backwards
        graph = forgetting_graph() if forgets_graph else nullcontext()
        try:
            with precision.weights(self._model), precision.region(), torch.enable_grad(), graph:
                return float(self._objective(fresh(batch, precision.cast))[1].detach())
        except GraphForgottenError:  # the forward computes gradients, as force-field models do
            self._runs_backwards = True
        finally:
            start.restore()
        return self._loss_in(precision, batch, False)

    def _on_the_path(self, places: list[int]) -> Choice:
        """Return the cheapest choice on the greedy path that keeps the loss, or the closest if none does."""
        choices = path(self._options_by_name)
        last = len(choices) - 1
        for index in sorted({round(last * number / _FRONTIER_POINTS) for number in range(_FRONTIER_POINTS + 1)}):
            if self._left > 0:
                self._error(choices[index], places)
        kept = [index for index in range(last + 1) if self._is_kept(choices[index])]
        if not kept:  # module errors can cancel, so the most exact choice need not be the closest
            return self._choices[min(self._points.values(), key=lambda point: (point.error, point.cost)).policy]
        low, high = max(kept), last + 1
        run = [index for index in range(low + 1, last + 1) if self._policy(choices[index]) in self._points]
        high = min(run, default=high)
        while high - low > 1 and self._left > 0:
            middle = (low + high) // 2
            if self._error(choices[middle], places) <= self._tolerance:
                low = middle
            else:
                high = middle
        return choices[low]

    def _is_kept(self, choice: Choice) -> bool:
        point = self._points.get(self._policy(choice))
        return point is not None and point.error <= self._tolerance

    def _improved(self, choice: Choice, places: list[int]) -> Choice:
        """Return a cheaper choice that keeps the loss, if one is found before the budget is spent.

        Choices that are expected to keep the loss are run first, then those that may keep it because module errors have
        signs and can cancel.
        """
        if not self._is_kept(choice):
            return choice
        is_small = math.prod(map(len, self._options_by_name.values())) <= _MOST_CHOICES
        for margin in (*_MARGINS, math.inf) if is_small else _MARGINS:
            better: Choice | None = choice
            while better is not None:
                choice, better = better, None
                for other in self._cheaper(choice, margin * self._tolerance):
                    if self._left <= 0:
                        return choice
                    if self._error(other, places) <= self._tolerance:
                        better = other
                        break
        return choice

    def _cheaper(self, choice: Choice, most_error: float) -> list[Choice]:
        """Return choices that are cheaper than `choice`, cheapest first; only similar ones if there are many.

        Args:
            choice: The choice to improve.
            most_error: The largest expected error; choices with more are left out.
        """
        options = self._options_by_name
        changes = [
            {name: option.format}
            for name, module_options in options.items()
            for option in module_options
            if option.format != choice[name] and math.isfinite(option.effect)
        ]
        if math.prod(map(len, options.values())) <= _MOST_CHOICES:
            finite = [[option.format for option in of if math.isfinite(option.effect)] for of in options.values()]
            others = [dict(zip(options, formats, strict=True)) for formats in itertools.product(*finite)]
        else:
            pairs = [{**a, **b} for a, b in itertools.combinations(changes, 2)] if len(changes) <= 64 else []
            others = [{**choice, **change} for change in [*changes, *pairs]]
        cost = self._cost(choice)
        rated = [(self._cost(other), self._expected_error(other), index) for index, other in enumerate(others)]
        rated = [entry for entry in rated if entry[0] < cost * (1 - 1e-9) and entry[1] <= most_error]
        return [others[index] for _, _, index in sorted(rated)]

    def _expected_error(self, choice: Choice) -> float:
        """Return the error of a choice that the effects predict, if the errors of modules are independent."""
        chosen = [self._option_of[name, chosen] for name, chosen in choice.items()]
        return math.sqrt(sum(option.effect for option in chosen)) / self._mean_loss

    def _repaired(self, choice: Choice, places: list[int], held_out: list[int]) -> tuple[Choice, float]:
        """Return a choice that is within the tolerance on held-out batches, and its error there.

        If the choice found is not, try the other choices that kept the loss, cheapest first, then raise modules of the
        one with the least error. If no choice is within the tolerance, run the closest ones of the search batches on
        the held-out batches, and return the one with the least error there. Stops when the budget is spent.
        """
        errors: dict[Policy, float] = {}

        def error_of(policy: Policy) -> float:
            if policy not in errors and errors and self._forwards < len(held_out):
                return math.inf
            if policy not in errors:
                errors[policy] = self._mean_error(policy, held_out)
            return errors[policy]

        def nearest_run() -> Policy:
            return min(errors, key=lambda policy: (errors[policy], self._points[policy].cost))

        self._error(choice, places)
        first = self._policy(choice)
        kept = [point for point in self._points.values() if point.error <= self._tolerance and point.policy != first]
        kept.sort(key=lambda point: (point.cost, point.error))
        for policy in [first, *(point.policy for point in kept[: _HELD_OUT_RUNS - 1])]:
            if error_of(policy) <= self._tolerance:
                return self._choices[policy], errors[policy]
        raised = self._raised(self._choices[nearest_run()])
        while raised is not None and self._forwards >= len(places) + len(held_out):
            self._error(raised, places)
            if error_of(self._policy(raised)) <= self._tolerance:
                return raised, errors[self._policy(raised)]
            raised = self._raised(raised)
        by_error = sorted(self._points.values(), key=lambda point: (point.error, point.cost))
        for point in [*by_error[:_HELD_OUT_RUNS], *self._frontier(first).points]:
            error_of(point.policy)
        return self._choices[nearest_run()], errors[nearest_run()]

    def _raised(self, choice: Choice) -> Choice | None:
        """Return a choice with one module raised, where the least cost removes the most effect; None if none can be."""
        raises: list[tuple[float, str, str]] = []
        for name, module_options in self._options_by_name.items():
            now = self._option_of[name, choice[name]]
            for option in module_options:
                if (option.effect, -option.digits) < (now.effect, -now.digits):
                    gain = now.effect - option.effect if math.isfinite(now.effect) else math.inf
                    raises.append((gain / max(option.cost - now.cost, 1e-9 * now.cost), name, option.format))
        return {**choice, max(raises)[1]: max(raises)[2]} if raises else None

    def _frontier(self, chosen: Policy) -> Frontier:
        points: list[Point] = []
        for point in sorted(self._points.values(), key=lambda other: (other.cost, other.error)):
            is_chosen = point.policy == chosen
            if is_chosen or not points or point.error < min(other.error for other in points):
                points.append(Point(point.cost, point.error, point.policy, is_chosen))
        return Frontier(tuple(points))

    def _notes(self) -> list[str]:
        if not self._refusals:
            return []
        return [f"{several(len(self._refusals), 'policy run')} failed, the first with: {self._refusals[0]}"]

    def _not_tried(self, called: set[str], only_held_out: tuple[str, ...], drift: Drift) -> list[str]:
        numbers = Counter(len(module_options) for module_options in self._options_by_name.values())
        policies = " * ".join(f"{formats}^{modules}" for formats, modules in sorted(numbers.items()))
        left_out = [
            f"{policies} policies, except the {len(self._points)} that were run",
            "op rules, other formats, and other precisions of the loss function",
        ]
        left_out += [
            f"{policy_drift.name}: the model {policy_drift.problem}" for policy_drift in drift if policy_drift.problem
        ]
        if only_held_out:
            left_out.append(f"formats for modules that only held-out batches call: {', '.join(only_held_out)}")
        unknown = {module.name for policy_drift in drift for module in policy_drift.modules if module.effect is None}
        unknown &= set(self._options_by_name)
        if unknown:
            left_out.append(f"lower formats for modules with an unknown effect: {', '.join(sorted(unknown))}")
        others = len(called - set(self._options_by_name))
        if others:
            left_out.append(
                f"formats for {several(others, 'module')} without {self._kind}, which use the surrounding format"
            )
        return left_out


def _square(shift: float | None) -> float:
    return math.inf if shift is None else shift * shift


def _no_progress(what: str, done: int, total: int) -> None:
    pass
