"""Compare runs with a golden: is it the same function, and is it as accurate?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from castwise.checking._golden import Golden
from castwise.checking._recorder import DECIDING, Measurement, ProbeKey
from castwise.checking._result import Accuracy
from castwise.checking._sketches import Sketch, relative_error

_Value = TypeVar("_Value", Sketch, float)
SAME, DIFFERENT = 1e-10, 1e-8
"""Relative differences in float64 up to which a function is the same, and above which it is another one."""
NOISE = 1e-10
"""What one rounding in float64 may move in a value that is compared."""
NEGLIGIBLE = 1e-8
"""Part of the largest norm of a kind in a step below which a norm counts as zero."""
ALLOWED = {"float32": 100.0, "bfloat16": 3.0, "float16": 3.0}
"""How many times the recorded error may be reached in a run of this dtype: random rounding underestimates what another
order of float32 sums does, by up to 31 times where it was measured."""
ALLOWED_OF_MODULES, ALLOWED_OF_16_BITS = 100.0, 1.5
"""The same for a module's own error, and where that is one of 16 bits: the rewrites of two of the five programs in
benchmarks/changes reached 0.7 times."""
_LARGE = 2.0**-17  # an error beyond those of float32, whose unit is 2**-24; that of float16 is 2**-11
USABLE = 0.3
"""Recorded error above which the accuracy of a value is not compared."""
_NOT_SET = "not set"
_FLOOR = 2.0**-27  # a float32 unit over 8: an error below it is as good as none


def largest_norms(probes: Mapping[ProbeKey, Sketch]) -> dict[tuple[int, str], float]:
    """Return the largest norm of each kind in each step."""
    norms: dict[tuple[int, str], float] = {}
    for key, sketch in probes.items():
        if math.isfinite(sketch.norm):
            norms[key.step, key.kind] = max(norms.get((key.step, key.kind), 0.0), sketch.norm)
    return norms


def errors(probes: Mapping[ProbeKey, Sketch], reference: Mapping[ProbeKey, Sketch]) -> dict[ProbeKey, float]:
    """Return relative errors of the values that both have, in the order of the reference."""
    norms = largest_norms(reference)
    return {
        key: relative_error(probes[key], sketch, NEGLIGIBLE * norms.get((key.step, key.kind), 0.0))
        for key, sketch in reference.items()
        if key in probes
    }


def own_errors(run: Mapping[ProbeKey, Sketch], exact: Mapping[ProbeKey, Sketch]) -> dict[ProbeKey, float]:
    """Return errors of a program against the same program in float64.

    Its parameters are matched by position: in float64, models are named in the order of their calls, not of the steps.
    """
    old, new = ([key.name for key in probes if key.kind == "param"] for probes in (exact, run))
    return errors(with_old_names(run, dict(zip(new, old, strict=False))), exact)


def noise_of(exact: Measurement, moved: Measurement) -> set[ProbeKey]:
    """Return what one rounding in float64 changes so much that it cannot be compared."""
    found = errors(moved.probes, exact.probes)
    noisy = {key for key, error in found.items() if not (error <= NOISE and math.isfinite(exact.probes[key].norm))}
    norms = largest_norms(exact.probes)
    # Adam divides a gradient by its own size, so the update of one that is only rounding is of full size.
    for key, sketch in exact.probes.items():
        if key.kind == "gradient" and sketch.norm <= 1e-10 * norms[key.step, "gradient"]:
            noisy |= {
                later
                for later in exact.probes
                if later.name == key.name and later.kind in ("arrived", "gradient", "update")
            }
    return noisy


def renamed(golden: Golden, now: Mapping[ProbeKey, Sketch]) -> dict[str, str]:
    """Return new names of parameters by their old ones, if all have other names and the same initial values."""
    old, new = ([key for key in probes if key.kind == "param"] for probes in (golden.probes, now))
    if len(old) != len(new) or {key.name for key in old} == {key.name for key in new}:
        return {}
    pairs = list(zip(old, new, strict=True))
    if any(relative_error(now[b], golden.probes[a]) > DIFFERENT for a, b in pairs):
        return {}
    return {b.name: a.name for a, b in pairs}


def with_old_names(probes: Mapping[ProbeKey, _Value], names: Mapping[str, str]) -> dict[ProbeKey, _Value]:
    """Return sketches or errors with parameters named as in the golden."""
    of_params = ("param", "arrived", "gradient", "update")
    return {
        key._replace(name=names.get(key.name, key.name)) if key.kind in of_params else key: sketch
        for key, sketch in probes.items()
    }


def has_losses(probes: Iterable[ProbeKey]) -> bool:
    """Return True if the program calls `backward`, and not `torch.autograd.grad`, whose arguments may be anything."""
    return any(key.kind == "loss" for key in probes)


def _unchanging(probes: Mapping[ProbeKey, Sketch]) -> set[tuple[str, str]]:
    """Return kinds and names of what a program may as well not have: constant buffers and frozen parameters.

    Their values show in what is computed with them. A buffer that was seen once may not be constant.
    """
    buffers: dict[str, list[Sketch]] = {}
    changed = set()
    for key, sketch in probes.items():
        if key.kind == "buffer":
            buffers.setdefault(key.name, []).append(sketch)
        elif key.kind == "gradient" or (key.kind == "update" and sketch.norm != 0):
            changed.add(key.name)
    constant = {("buffer", name) for name, seen in buffers.items() if len(seen) > 1 and len(set(seen)) == 1}
    frozen = {key[1:3] for key in probes if key.kind in ("param", "update") and key.name not in changed}
    return constant | frozen


class Comparison:
    """A run in float64, compared with that of a golden.

    Args:
        golden: The golden.
        now: Sketches of the run, with names as in the golden.
    """

    def __init__(self, golden: Golden, now: Mapping[ProbeKey, Sketch]) -> None:
        self.golden = golden
        self._now = now
        compares_losses = has_losses(golden.probes) and has_losses(now)
        kinds = [kind for kind in DECIDING if kind != "loss" or compares_losses]
        deciding = [key for key in golden.probes if key.kind in kinds]
        unchanging = _unchanging(golden.probes), _unchanging(now)
        self.missing = [key for key in deciding if key not in now and key[1:3] not in unchanging[0]]
        self.new = [
            key for key in now if key.kind in kinds and key not in golden.probes and key[1:3] not in unchanging[1]
        ]
        all_errors = errors(now, golden.probes)
        self.left_out = sum(key in golden.left_out for key in deciding)
        self.errors = {key: error for key, error in all_errors.items() if key not in golden.left_out}
        self.deciding = {key: error for key, error in self.errors.items() if key.kind in DECIDING}

    @property
    def largest(self) -> float:
        """The largest relative difference of a value that decides."""
        return max(self.deciding.values(), default=0.0)

    @property
    def is_different(self) -> bool:
        """Whether the function is another one."""
        return bool(self.missing or self.new) or self.largest > DIFFERENT

    def place(self) -> tuple[str, int]:
        """Return where the first difference is, and its step, from 1."""
        counts = [
            Counter((key.step, key.kind, key.name) for key in probes) for probes in (self.golden.probes, self._now)
        ]
        for key, error in self.errors.items():
            call = (key.step, key.kind, key.name)
            if error > DIFFERENT and (key.kind in DECIDING or counts[0][call] == counts[1][call]):
                return self._described(key), key.step + 1
        if self.missing:
            return f"{_value(self.missing[0])} is missing", self.missing[0].step + 1
        return f"{_value(self.new[0])} is new", self.new[0].step + 1

    def _described(self, key: ProbeKey) -> str:
        name = key.name or "the model"
        if key.kind == "in":
            caller = self.golden.callers.get(key)
            return f"the data, or code before {name}" if caller is None else f"{caller or 'the model'}, forward"
        if key.kind in ("forward", "backward"):
            return f"{name}, {key.kind}"
        if key.kind in ("arrived", "gradient"):
            return self._gradients(key)
        return {"loss": "loss", "update": "optimizer", "param": f"initial weight {key.name}"}.get(key.kind, _value(key))

    def _gradients(self, first: ProbeKey) -> str:
        """Return the one module whose gradients differ; the first of some, if they differ as the backward leaves them.

        If all do, or some only at the step, they are changed after they are computed. One that is missing comes first:
        clipping by norm changes all others, then.
        """
        gone = [key for key in self.missing if key.step == first.step and key.kind == "gradient"]
        if gone:
            return f"{_value(gone[0])} is missing"
        if first.kind == "gradient" and self.errors.get(first._replace(kind="arrived"), math.inf) <= DIFFERENT:
            return "between backward and step"
        keys = [key for key in self.errors if key.step == first.step and key.kind == first.kind]
        of_step = {key.name: self.errors[key] for key in keys}
        owners = {name.rpartition(".")[0] for name, error in of_step.items() if error > DIFFERENT}
        others = {name.rpartition(".")[0] for name in of_step} - owners
        if others and (len(owners) == 1 or first.kind == "arrived"):
            return f"{first.name.rpartition('.')[0]}, weight gradient"
        return "between backward and step"


def _value(key: ProbeKey) -> str:
    return key.name if key.kind == "loss" else f"{key.kind} {key.name}"


def changed_settings(golden: Golden, now: list[list[dict[str, Any]]]) -> dict[str, bool]:
    """Return what differs in the settings of the optimizers, each once, exactly; and whether it decides.

    A setting decides if both optimizers are of one class and have it, with values that differ by more than a rounding
    to float32. Other classes and groups may compute the same, and a setting may be new in a version of torch.
    """
    found: dict[str, bool] = {}
    seen: set[tuple[str, bool]] = set()
    order: list[int] = []
    for step, (before, after) in enumerate(zip(golden.settings, now, strict=False), 1):
        if len(before) != len(after):
            found[f"{len(before)} parameter groups are now {len(after)}"] = False
            continue
        order = order or _order_of(before, after)  # only the first step has the names of parameters
        if len(order) <= len(after):  # groups may have been added since
            after = [after[position] for position in (*order, *range(len(order), len(after)))]
        for old, new in zip(before, after, strict=True):
            is_another = old["optimizer"] != new["optimizer"]
            if is_another:
                found[f"optimizer {old['optimizer']} is now {new['optimizer']}"] = False
            if set(old["params"]) != set(new["params"]):
                found[f"other parameters in group {old['group']} of {old['optimizer']}"] = False
            names = [*old["values"], *(name for name in new["values"] if name not in old["values"])]
            if is_another:  # most of whose settings have no counterpart
                names = [name for name in old["values"] if name in new["values"]]
            for name in names:
                pair = [values["values"].get(name, _NOT_SET) for values in (old, new)]
                decides = not is_another and _NOT_SET not in pair and not _is_rounded(*pair)
                if pair[0] != pair[1] and (name, decides) not in seen:
                    seen.add((name, decides))
                    found[f"{name} {pair[0]} is now {pair[1]} ({old['optimizer']}, step {step})"] = decides
    return found


def _order_of(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[int]:
    """Return positions of groups in the order of the recorded ones, if both have groups of the same parameters."""
    old, new = ([set(group["params"]) for group in groups] for groups in (before, after))
    positions = [new.index(params) for params in old if params in new]
    return positions if len(set(positions)) == len(after) else [*range(len(after))]


def _is_rounded(old: Any, new: Any) -> bool:
    """Return True if a number is the other one rounded, as a rate is that has become a float32 tensor."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(map(_is_rounded, old, new))
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=2.0**-23)
    return bool(old == new)


def accuracy(golden: Golden, own: Mapping[ProbeKey, float]) -> Accuracy | None:
    """Return the value whose error exceeds what was recorded most; None if none can be compared.

    If a loss is the first that exceeds what is allowed, it is that loss: gradients and updates follow from it.

    Args:
        golden: The golden.
        own: Errors of the program in its own dtypes against its own run in float64.
    """
    allowed = ALLOWED.get(golden.dtype, 100.0)
    worst: Accuracy | None = None
    is_allowed = True
    for key, error in own.items():
        if key not in golden.errors or key in golden.left_out:
            continue
        recorded, spread = golden.errors[key], golden.spreads[key]
        if max(recorded, spread) < USABLE:
            ratio = error / max(recorded, spread, _FLOOR)
            if worst is None or not ratio <= worst.ratio:
                worst = Accuracy(f"{_value(key)}, step {key.step + 1}", error, recorded, spread, allowed, ratio)
            if is_allowed and not ratio <= allowed:
                if key.kind == "loss":
                    return worst
                is_allowed = False
    return worst


def accuracy_of_modules(golden: Golden, local: Mapping[str, float]) -> Accuracy | None:
    """Return the first module whose own error exceeds what is allowed, or else the one nearest to it."""
    found: Accuracy | None = None
    for name, error in local.items():
        if name in golden.local:
            recorded = golden.local[name]
            is_of_16_bits = golden.dtype != "float32" and recorded > _LARGE
            allowed = ALLOWED_OF_16_BITS if is_of_16_bits else ALLOWED_OF_MODULES
            one = Accuracy(name or "the model", error, recorded, None, allowed, error / max(recorded, _FLOOR))
            if found is None or found.ratio / found.allowed < min(1, one.ratio / allowed):
                found = one
    return found


def owner_of(value: str, names: Iterable[str]) -> str:
    """Return the module in the description of a value, such as `head` of "gradient head.weight, step 1"."""
    name = value.partition(", step")[0].partition(" ")[2]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or value
