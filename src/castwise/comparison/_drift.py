"""The result of `compare`: figures by policy and module, as tables and as plain data."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise._frames import new_frame
from castwise._number_text import percent, several
from castwise._shown import Block, Shown, Table
from castwise.comparison._callables import ModuleAlone
from castwise.comparison._closest import closest
from castwise.comparison._drift_map import tiles
from castwise.comparison._errors import Errors
from castwise.comparison._log_probs import LogProbDrift

if TYPE_CHECKING:
    import pandas

    from castwise.policy._policy import Policy

SHOWN_MODULES = 15
MODULE_NUMBERS = {3, 4, 5, 6, 7}


@dataclass(frozen=True)
class ModuleDrift:
    """The effect of a policy on one module.

    Args:
        name: Qualified name without wrappers; "" for the model itself.
        type: Type of the module.
        place: Position in the order of registration, from 0.
        calls: Number of calls over all batches.
        computes_in: The dtype or the recipe that the policy gives the module.
        effect: Root mean square, over the elements of the outputs, of the loss's gradient times the error that the
            module introduces; inf if one of these errors is not finite, None if unknown, for example if the module
            cannot be run in isolation or runs without gradients.
        loss_shift: The same with the sum of squares instead of their mean: the standard deviation of the change in the
            loss, if the errors are independent.
        introduced: Errors that the module's own ops make on the reference's inputs, without those of submodules.
        carried: The rest of the total error, which comes from errors in the inputs.
        total: Errors of the outputs in the policy's run.
        gradients: Errors of the gradients of its own parameters; None if it has none or `gradients` is False.
        introduced_gradients: Errors in these that the module's own ops make, forward and backward, on the reference's
            inputs and output gradients; None if unknown: for sharded weights, weights that a hook computes, and noise.
        carried_gradients: The rest of `gradients`.
        problem: Why something is missing; "" if nothing is.
        returns: The dtypes of its outputs under the policy, such as "float32" for a norm that is kept in fp32, or
            "bfloat16, float32".
    """

    name: str
    type: str
    place: int
    calls: int
    computes_in: str
    effect: float | None
    loss_shift: float | None
    introduced: Errors | None
    carried: Errors | None
    total: Errors | None
    gradients: Errors | None
    introduced_gradients: Errors | None = None
    carried_gradients: Errors | None = None
    problem: str = ""
    returns: str = ""


@dataclass(frozen=True)
class Summary:
    """The effect of a policy on the loss and the gradient of all parameters.

    Args:
        loss: Mean over the batches.
        reference_loss: The same in the reference.
        relative_loss_error: Mean over the batches of `|loss - reference loss| / |reference loss|`.
        gradient_cosine: Cosine of the angle to the reference's gradient; None without gradients.
        gradient_norm_ratio: Norm of the gradient relative to the reference's; None without gradients.
        gradient_errors: Errors of the gradient; None without gradients.
        loss_scale: The scale of the loss in the backward; 1 unless the policy computes in fp16.
        log_probs: Drift of the log-probabilities of the target tokens; None if the outputs are not logits.
        loss_error: Mean over the batches of `|loss - reference loss|`, in units of the loss.
        output_errors: Errors of the model's outputs; None if they are not known, as with a `forward`.
    """

    loss: float
    reference_loss: float
    relative_loss_error: float
    gradient_cosine: float | None
    gradient_norm_ratio: float | None
    gradient_errors: Errors | None
    loss_scale: float
    log_probs: LogProbDrift | None
    loss_error: float = math.nan
    output_errors: Errors | None = None


@dataclass(frozen=True)
class PolicyDrift:
    """The effect of one policy on a model.

    Args:
        name: The name given to `compare`.
        policy: The policy; None for a callable, and for the reference with other batches.
        summary: Figures of the whole model.
        modules: The modules that were called, by effect, largest first; none for a callable.
        problem: Why the model cannot be run under the policy; "" if it can.
        alone: Of a compiled model, its modules, each compiled by itself, in the order of their calls.
    """

    name: str
    policy: Policy | None
    summary: Summary
    modules: tuple[ModuleDrift, ...]
    problem: str = ""
    alone: tuple[ModuleAlone, ...] = ()

    def __getitem__(self, name: str) -> ModuleDrift:
        """Return the module with a name; raise a KeyError if there is none."""
        for module in self.modules:
            if module.name == name:
                return module
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        """Return True for the name of a module."""
        return any(module.name == name for module in self.modules)

    def __repr__(self) -> str:
        of = self.failure or f"loss off by {self.summary.relative_loss_error:.2g} of itself"
        return f"PolicyDrift({self.name}: {of}, {len(self.modules)} modules)"

    @property
    def failure(self) -> str:
        """Why the policy has no finite figures; "" if it has."""
        if self.problem:
            return self.problem
        gradients = self.summary.gradient_errors
        if not math.isfinite(self.summary.loss):
            return ": ".join(filter(None, [f"its loss is {self.summary.loss}", self._origin()]))
        if gradients is not None and gradients.nonfinite:
            return (
                f"{percent(gradients.nonfinite)} of its gradients are not finite, though the loss scale is only "
                f"{self.summary.loss_scale:g}"
            )
        return ""

    def _origin(self) -> str:
        """Return the first module with non-finite values, in the model's order, as text; "" if it is not known."""
        if not self.modules:  # a callable
            outputs = self.summary.output_errors
            if outputs is None:
                return ""
            lost = f"{percent(outputs.nonfinite)} of its output is not finite"
            return lost if outputs.nonfinite else "its output is finite, so it comes from the loss function"
        in_order = sorted(self.modules, key=lambda module: module.place)
        for module in in_order:
            if module.introduced is not None and module.introduced.nonfinite:
                return f"{module.name or '(root)'} ({module.type}) produces non-finite values from finite inputs"
        for module in in_order:
            if module.total is not None and module.total.nonfinite:
                return f"the first non-finite values are in the output of {module.name or '(root)'}"
        return "all modules return finite values, so it comes from the loss function"

    def _blocks_alone(self) -> Iterator[Block]:
        """Yield a table of the modules that were compiled by themselves, by the growth of their errors."""
        known = [(each, *_both(each)) for each in self.alone if each.compiled is not None and each.eager is not None]
        known.sort(key=lambda row: row[1] / row[2] if row[2] else (math.inf if row[1] else 0.0), reverse=True)
        if known:
            rows = [
                (each.name, each.type, _number(own), _number(eager), f"{own / eager:.3g}" if eager else "")
                for each, own, eager in known[:SHOWN_MODULES]
            ]
            more = len(known) - SHOWN_MODULES
            yield Table(
                [("module", "type", "compiled", "eager", "compiled / eager"), *rows],
                {2, 3, 4},
                f"{self.name}: each module compiled by itself, errors relative to float64",
                f"and {several(more, 'more module')}: drift[{self.name!r}].alone" if more > 0 else "",
            )
        failed = [each for each in self.alone if each.problem]
        if failed:
            first = f"the first {failed[0].name}: {failed[0].problem}"
            yield f"{self.name}: {several(len(failed), 'module')} could not be compared, {first}"

    def rows(self, noise: PolicyDrift | None = None) -> list[tuple[str, ...]]:
        """Return the rows of the table of modules as text, header first.

        Args:
            noise: The reference with other batches; adds a column with its errors.
        """
        noise_errors = {} if noise is None else {module.name: module.total for module in noise.modules}
        header = ("module", "type", "computes in", "effect", "introduced", "carried", "gradients", "noise")
        rows = [
            (
                *(module.name or "(root)", module.type, module.computes_in, _number(module.effect)),
                *map(_relative, (module.introduced, module.carried, module.gradients, noise_errors.get(module.name))),
            )
            for module in self.modules
        ]
        shown = [column for column in range(len(header)) if column < 6 or any(row[column] for row in rows)]
        return [tuple(row[column] for column in shown) for row in (header, *rows)]


@dataclass(frozen=True, repr=False)
class Drift(Shown):
    """The effect of precisions on a model, module by module; prints as tables.

    Args:
        policies: Results by the names given to `compare`.
        reference: "float32", "float64", or "policy".
        batches: Number of batches compared.
        noise: The reference against itself with other batches, if `vary` was given.
        not_called: Modules that no batch called.
        notes: Other remarks on the figures.
    """

    policies: Mapping[str, PolicyDrift]
    reference: str
    batches: int
    noise: PolicyDrift | None = None
    not_called: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PolicyDrift:
        """Return the result of one policy."""
        return self.policies[name]

    def __iter__(self) -> Iterator[PolicyDrift]:
        return iter(self.policies.values())

    def __len__(self) -> int:
        return len(self.policies)

    def __contains__(self, policy: object) -> bool:
        """Return True for the name of a policy, and for the result of one."""
        return policy in self.policies if isinstance(policy, str) else policy in self.policies.values()

    def __repr__(self) -> str:
        return f"Drift({', '.join(self.policies)}: {self.headline()})"

    def _blocks(self) -> Iterator[Block]:
        yield from tiles(self, {}, self.batches, SHOWN_MODULES)
        yield self.headline()
        if result := self.result():
            yield result
        yield Table(self.summary_rows(), right=range(1, 20))
        for policy_drift in self:
            if policy_drift.problem:  # listed in the notes
                continue
            if not policy_drift.modules:
                yield from policy_drift._blocks_alone()
                continue
            rows = policy_drift.rows(self.noise)
            more = len(rows) - 1 - SHOWN_MODULES
            yield Table(
                rows[: SHOWN_MODULES + 1],
                MODULE_NUMBERS,
                f"{policy_drift.name}: modules by effect on the loss",
                f"and {several(more, 'more module')}: drift[{policy_drift.name!r}].modules" if more > 0 else "",
            )
        if self.not_called:
            yield f"never called: {', '.join(self.not_called)}"
        yield from (f"note: {note}" for note in self.notes)

    def headline(self) -> str:
        """Return one line with the reference, its loss, and the number of batches."""
        reference = "a policy" if self.reference == "policy" else self.reference
        first = next(iter(self), self.noise)
        loss = "" if first is None else f", whose loss is {first.summary.reference_loss:.6g}"
        return f"against {reference}{loss}, over {self.batches:,} batch{'' if self.batches == 1 else 'es'}"

    def result(self) -> str:
        """Return in a sentence which policy is closest to the reference by its loss; "" for fewer than two."""
        return ": ".join(filter(None, closest(self)))

    def summary_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the summary table as text, header first: one per policy, and one for the noise.

        Columns without a number are left out.
        """
        header = ("policy", "loss", "relative error", "gradient cosine", "norm ratio")
        # Of policies, the table of modules has it too: the root's introduced and carried errors.
        has_outputs = any(policy.summary.output_errors is not None for policy in self if not policy.modules)
        header = (*header, *(("output error",) if has_outputs else ()))
        log_probs = ("mean |log ratio|", "largest", "KL k1", "KL k3", "outside band")
        policies = [*self, *([self.noise] if self.noise is not None else [])]
        has_tokens = any(policy.summary.log_probs is not None for policy in policies)
        rows = [(*header, *(log_probs if has_tokens else ()))]
        for policy in policies:
            summary = policy.summary
            if policy.problem:
                rows.append((policy.name, "cannot be run", *([""] * (len(rows[0]) - 2))))
                continue
            row = [policy.name, f"{summary.loss:.6g}", _number(summary.relative_loss_error)]
            cosine, ratio = summary.gradient_cosine, summary.gradient_norm_ratio
            row += ["" if cosine is None else f"{cosine:.6f}", "" if ratio is None else f"{ratio:.4f}"]
            row += [_relative(summary.output_errors)] if has_outputs else []
            tokens = summary.log_probs
            if has_tokens and tokens is not None:
                row += map(_number, (tokens.mean_difference, tokens.largest_difference, tokens.kl_k1, tokens.kl_k3))
                row += [percent(tokens.outside_band)]
            rows.append((*row, *([""] * (len(rows[0]) - len(row)))))
        shown = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
        return [tuple(row[column] for column in shown) for row in rows]

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with a row for each policy and module.

        Errors are those of `ModuleDrift`, as `relative_rms`. Of a compiled model, there is a row for each module that
        was compiled by itself, with its type and its total error alone.

        Raises:
            ImportError: pandas is not installed; it comes with `castwise[pandas]`.
        """
        errors = ("introduced", "carried", "total", "gradients", "introduced_gradients", "carried_gradients")
        figures = ("type", "computes_in", "calls", "effect", "loss_shift")
        rows = [
            [
                *(policy_drift.name, module.name or "(root)", *(getattr(module, name) for name in figures)),
                *(_relative_rms(getattr(module, name)) for name in errors),
            ]
            for policy_drift in self
            for module in policy_drift.modules
        ]
        columns = ("policy", "module", *figures, *errors)
        for drift in self:
            for one in drift.alone:
                total = _relative_rms(one.compiled)
                known = {"policy": drift.name, "module": one.name, "type": one.type, "total": total}
                rows.append([known.get(column) for column in columns])
        return new_frame(columns, rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON-serializable lists and dicts, with NaN as None and inf as "inf"."""
        policies = {name: _record(drift) for name, drift in self.policies.items()}
        return {
            "reference": self.reference,
            "batches": self.batches,
            "result": self.result(),
            "policies": policies,
            "noise": None if self.noise is None else _record(self.noise),
            "not_called": list(self.not_called),
            "notes": list(self.notes),
        }

    def report(self, path: str | os.PathLike[str], *, shared_script: bool | str | os.PathLike[str] = False) -> Path:
        """Write the result as one HTML page: a heat map of modules and policies, plots, and tables.

        Args:
            path: Where to write. An existing page of castwise is replaced.
            shared_script: Load plotly.js from a file beside the page; see `castwise.report.write_report`.

        Returns:
            `path`.

        Raises:
            FileExistsError: There is a file that castwise has not written.
            ImportError: plotly or jinja2 is not installed; they come with `castwise[report]`.
            OSError: The page cannot be written.
        """
        from castwise.comparison._drift_report import write_drift_report

        return write_drift_report(self, path, shared_script=shared_script)


def _both(module: ModuleAlone) -> tuple[float, float]:
    assert module.compiled is not None
    assert module.eager is not None
    return module.compiled.relative_rms, module.eager.relative_rms


def plain_policy(policy: Policy) -> dict[str, Any]:
    """Return the fields of a policy as JSON-serializable values."""
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}


def _record(drift: PolicyDrift) -> dict[str, Any]:
    return {
        "policy": None if drift.policy is None else plain_policy(drift.policy),
        "problem": drift.problem,
        "failure": drift.failure,
        "summary": plain(dataclasses.asdict(drift.summary)),
        "modules": [plain(dataclasses.asdict(module)) for module in drift.modules],
        **({"alone": [plain(dataclasses.asdict(module)) for module in drift.alone]} if drift.alone else {}),
    }


def plain(value: Any) -> Any:
    """Return a JSON-serializable value, with NaN as None and inf as "inf"."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2e}" if value and math.isfinite(value) else f"{value + 0.0:g}"  # no minus sign before a zero


def _relative_rms(errors: Errors | None) -> float | None:
    return None if errors is None else errors.relative_rms


def _relative(errors: Errors | None) -> str:
    if errors is None:
        return ""
    lost = f" ({percent(errors.nonfinite)} not finite)" if errors.nonfinite else ""
    return _number(errors.relative_rms) + lost
