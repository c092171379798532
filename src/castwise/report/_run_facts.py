"""Facts computed from a run's records: skips by cause, the scale over time, and the ranges of each module.

The verdict, the report page and the terminal output all use these facts, so they always agree.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from castwise.monitor import _causes as causes
from castwise.monitor._formats import FP16, LOW_PRECISION
from castwise.monitor._recorded_run import Run
from castwise.monitor._records import SampleRecord, Stats, StepRecord, nearest_exponent
from castwise.report._diagnosed import Diagnosed, diagnosed
from castwise.report._divergence import Growth, find_divergence
from castwise.report._skips import Finding, Skips, assign, by_cause, grouped, skips_at_end
from castwise.report._underflow import Underflow

HUGE = 1e15
# Norms, embeddings and what adds to a residual stream return fp32 in autocast regions.
_ENOUGH_MODULES = 0.25
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
WHOLE_MODEL = "(whole model)"


def shown(module: str) -> str:
    """Return a module's display name; torch has no name for the model itself."""
    return module or WHOLE_MODEL


def named(module: str, *, begins: bool = False) -> str:
    """Return a module's display name for a sentence: "module 2" where the name alone would read as a number.

    Args:
        module: The name.
        begins: Whether the sentence begins with it.
    """
    return f"{'Module' if begins else 'module'} {module}" if module.replace(".", "").isdigit() else shown(module)


@dataclass
class Ranges:
    """The magnitudes of one module's gradients or outputs, over all samples in which they were finite.

    Args:
        module: The module's qualified name; "" is the model.
        exponents: Number of elements v with 2^e <= |v| < 2^(e + 1) by e, unscaled.
        elements: Number of sampled elements, including zeros.
        largest: Largest magnitude, unscaled; 0 if all were zero.
        largest_step: The step of `largest`.
        headroom_bits: Lowest log2(largest fp16 number / largest scaled magnitude); inf if all were zero.
        headroom_step: The step of `headroom_bits`.
        flush: Largest share of elements lost to underflow in fp16 in one sample; see `Underflow`.
        flush_step: The step of `flush`.
        flushed: Elements lost to underflow in fp16 at the scale of their sample.
        cut_off: Those of `flushed` that were already zero, probably because of fp16.
        vanished_samples: Number of samples, after the first nonzero one, in which all elements were zero.
        scale: Scale of the last sample.
        subnormal: Elements that are subnormal in fp16 at the scale of their sample.
        samples: Number of finite samples.
        nonfinite_steps: Steps of samples with an inf or NaN, which are excluded from everything else.
    """

    module: str
    exponents: Counter[int] = field(default_factory=Counter)
    elements: int = 0
    largest: float = 0.0
    largest_step: int = 0
    headroom_bits: float = math.inf
    headroom_step: int = 0
    flush: float = 0.0
    flush_step: int = 0
    flushed: float = 0.0
    cut_off: float = 0.0
    vanished_samples: int = 0
    scale: float = 1.0
    subnormal: float = 0.0
    samples: int = 0
    nonfinite_steps: list[int] = field(default_factory=list)

    @property
    def nonfinite_samples(self) -> int:
        """Number of samples with an inf or NaN."""
        return len(self.nonfinite_steps)

    @property
    def mean_flush(self) -> float:
        """Share of all sampled elements that were lost to underflow in fp16 at the scale of their sample."""
        return self.flushed / self.elements if self.elements else 0.0

    @property
    def cut_off_share(self) -> float:
        """Share of all sampled elements that were already zero, probably because of fp16."""
        return self.cut_off / self.elements if self.elements else 0.0

    @property
    def mean_subnormal(self) -> float:
        """Share of all sampled elements that are subnormal in fp16 at the scale of their sample."""
        return self.subnormal / self.elements if self.elements else 0.0

    def headroom_in(self, name: str) -> float:
        """Return the lowest log2(largest number of a format / largest scaled magnitude); inf if all were zero."""
        return self.headroom_bits + math.log2(LOW_PRECISION[name].largest) - math.log2(FP16.largest)

    def flush_in(self, name: str) -> float:
        """Return the share of all sampled elements lost to underflow in a format.

        That of a format other than fp16 is at the scale of the last sample, and counts no zeros.
        """
        if name == "fp16":
            return self.mean_flush
        return self.share_below(LOW_PRECISION[name].smallest_subnormal_exponent - 1 - nearest_exponent(self.scale))

    def share_below(self, exponent: int) -> float:
        """Return the exact share of elements v with 0 < |v| < 2^exponent; bins start at powers of two."""
        below = sum(count for bin_exponent, count in self.exponents.items() if bin_exponent < exponent)
        return below / self.elements if self.elements else 0.0

    def add(self, step: int, stats: Stats, underflow: Underflow) -> None:
        """Add the statistics of one sample; `underflow` belongs to the same sample."""
        if stats.nonfinite > 0:
            self.nonfinite_steps.append(step)
            return
        numel, fp16 = stats.numel, stats.formats["fp16"]
        self.samples += 1
        self.elements += numel
        for exponent, count in stats.exponents.items():
            self.exponents[exponent] += count
        self.scale = underflow.scale
        largest, headroom = stats.largest, fp16.headroom_bits
        flush = underflow.share(self.module, stats, "fp16")
        if not self.largest and largest and not underflow.is_cut_off(self.module):
            # All zero so far and healthy now: these are gradients behind a weight that started at zero.
            self.flush, self.flush_step, self.flushed, self.cut_off, self.vanished_samples = 0.0, 0, 0.0, 0.0, 0
        if largest > self.largest:
            self.largest, self.largest_step = largest, step
        if headroom < self.headroom_bits:
            self.headroom_bits, self.headroom_step = headroom, step
        if flush > self.flush:
            self.flush, self.flush_step = flush, step
        self.flushed += flush * numel
        self.cut_off += (flush - fp16.flush) * numel
        self.vanished_samples += flush == 1.0 and not largest
        self.subnormal += fp16.subnormal * numel


class RunFacts:
    """Facts computed from a run's records; each property is computed on first use.

    Args:
        run: The records.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def skips(self) -> list[Skips]:
        """Skipped steps by cause, most frequent first."""
        return by_cause(self.run.steps)

    @cached_property
    def divergence(self) -> tuple[Growth, ...]:
        """Numbers that grew by orders of magnitude before steps failed; empty if the run did not diverge.

        A run has not if its first fault is in the data, or in an op that no format would help, unless that got huge
        numbers.
        """
        growths = find_divergence(self.run.steps, self.grad_norms, self.typical_updates)
        since = growths[0].since if growths else math.inf
        first = next((diagnosis for diagnosis in self.run.diagnoses if diagnosis.step >= since), None)
        if first is None:
            return growths
        is_of_op = first.op != "" and (first.phase == "loss" or first.remedy in ("code", "input"))
        is_elsewhere = first.phase == "input" or (is_of_op and not _reads_huge(first.text))
        return () if is_elsewhere else growths

    @cached_property
    def findings(self) -> Mapping[Finding, list[Skips]]:
        """Skipped steps by the one finding that each belongs to, and by cause."""
        return assign(self.run.steps, self.divergence[0].since if self.divergence else None)

    @cached_property
    def diagnosed(self) -> list[Diagnosed]:
        """Results of replaying skipped steps, one per origin, in the order found."""
        return diagnosed(self.run.diagnoses)

    @cached_property
    def diagnosed_before_divergence(self) -> list[Diagnosed]:
        """`diagnosed` without results explained by divergence."""
        if not self.divergence:
            return self.diagnosed
        return diagnosed(record for record in self.run.diagnoses if record.step < self.divergence[0].since)

    @cached_property
    def diagnosed_in_divergence(self) -> list[Diagnosed]:
        """Results of replays that are explained by divergence."""
        if not self.divergence:
            return []
        return diagnosed(record for record in self.run.diagnoses if record.step >= self.divergence[0].since)

    @cached_property
    def skipped_steps(self) -> frozenset[int]:
        """The numbers of the skipped steps."""
        return frozenset(record.step for record in self.run.steps if record.skipped)

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return sum(len(skips.steps) for skips in self.skips)

    @cached_property
    def longest_streak(self) -> tuple[int, int]:
        """Length of the longest run of consecutive skips, and its first step; (0, 0) if no step was skipped."""
        best, length = (0, 0), 0
        for record in self.run.steps:
            length = length + 1 if record.skipped else 0
            if length > best[0]:
                best = (length, record.step - length + 1)
        return best

    @cached_property
    def skips_to_the_end(self) -> Sequence[StepRecord]:
        """Records of the skips after the last step that was taken."""
        return skips_at_end(self.run.steps)

    @cached_property
    def scales(self) -> list[tuple[int, float]]:
        """Step and scale of every scaled step."""
        pairs = [(record.step, record.scale) for record in self.run.steps if record.scale is not None]
        return [(step, float(scale)) for step, scale in pairs if math.isfinite(scale)]

    @cached_property
    def losses(self) -> list[float]:
        """The recorded losses."""
        return [float(record.loss) for record in self.run.steps if record.loss is not None]

    @cached_property
    def grad_norms(self) -> list[tuple[int, float]]:
        """Step and gradient norm of every clipped or sampled step."""
        sampled = {sample.step: sample.grad_norm for sample in self.run.samples}
        known = ((record.step, record.grad_norm) for record in self.run.steps)
        norms = ((step, sampled.get(step) if norm is None else norm) for step, norm in known)
        return [(step, float(norm)) for step, norm in norms if norm is not None]

    @cached_property
    def typical_updates(self) -> list[tuple[int, float]]:
        """Step and median update/weight ratio over the parameters, for every sampled step that was taken."""
        updates = ((sample.step, sample.weights.values()) for sample in self.run.samples)
        ratios = ((step, [float(update.update_to_weight) for update in group]) for step, group in updates)
        return [(step, statistics.median(group)) for step, group in ratios if group and not any(map(math.isnan, group))]

    @property
    def is_scaled(self) -> bool:
        """Whether losses were scaled; bf16 and fp32 runs have no scale, or a scale of 1."""
        return any(scale != 1.0 for _, scale in self.scales)

    @cached_property
    def computes_in(self) -> str:
        """The format in which the run computed: "fp16", "bf16", or "" if the record does not show it.

        It is the more frequent of the two if at least a quarter of the modules returned it. Records without dtypes are
        of fp16 if gradients end at fp16's smallest number, or if the loss was scaled.
        """
        returned = self.returned
        name, modules = max(((name, returned[name]) for name in ("bf16", "fp16")), key=lambda pair: pair[1])
        if modules and modules >= _ENOUGH_MODULES * returned.total():
            return name
        return "fp16" if self.has_cut_off or self.is_scaled else ""

    @cached_property
    def returned(self) -> Counter[str]:
        """Number of modules by the dtype of their output, such as "bf16"; empty if the record has no dtypes."""
        dtypes = {module: dtype for sample in self.run.samples for module, dtype in sample.dtypes.items()}
        return Counter(_SHORT.get(dtype, dtype) for dtype in dtypes.values())

    @property
    def has_cut_off(self) -> bool:
        """Whether gradients are cut off at fp16's smallest number, a sign that they were computed in fp16."""
        return any(ranges.cut_off > 0 for ranges in self.gradients.values())

    @cached_property
    def nonfinite_losses(self) -> list[int]:
        """Steps whose recorded loss is inf or NaN."""
        return [record.step for record in self.run.steps if record.has_bad_loss]

    @cached_property
    def faults(self) -> list[Skips]:
        """Steps that were taken with an inf or NaN in a loss or a gradient, by cause, the earliest first."""
        taken = grouped(record for record in self.run.steps if record.has_fault and not record.skipped)
        return sorted(taken, key=lambda skips: skips.steps[0])

    @cached_property
    def finite_samples(self) -> int:
        """Number of samples in which all gradients were finite."""
        return sum(not _has_nonfinite_gradients(sample) for sample in self.run.samples)

    @cached_property
    def nothing_finite(self) -> bool:
        """Whether there are samples, and no gradient and no output of any module was finite in one."""
        ranges = [*self.gradients.values(), *self.activations.values()]
        return bool(ranges) and not any(each.samples for each in ranges)

    @cached_property
    def poisoned(self) -> list[int]:
        """Sampled steps that were taken with non-finite gradients."""
        bad = (sample.step for sample in self.run.samples if _has_nonfinite_gradients(sample))
        return [step for step in bad if step not in self.skipped_steps]

    @cached_property
    def gradients(self) -> dict[str, Ranges]:
        """Ranges of the gradients of each module's own parameters, in model order."""
        return self._ranges("modules", [sample.modules for sample in self.run.samples])

    @cached_property
    def activations(self) -> dict[str, Ranges]:
        """Ranges of each module's outputs, in model order."""
        return self._ranges("activations", [sample.activations for sample in self.run.samples])

    @cached_property
    def underflows(self) -> Mapping[str, list[Underflow]]:
        """The underflow of each sample, for its "modules" and its "activations"."""
        return {
            kind: [Underflow.of(sample, kind) for sample in self.run.samples] for kind in ("modules", "activations")
        }

    def _ranges(self, kind: str, modules: Sequence[Mapping[str, Stats]]) -> dict[str, Ranges]:
        ranges: dict[str, Ranges] = {}
        for sample, by_module, underflow in zip(self.run.samples, modules, self.underflows[kind], strict=True):
            for module, stats in by_module.items():
                ranges.setdefault(module, Ranges(module)).add(sample.step, stats, underflow)
        return ranges

    @cached_property
    def lost_in_bf16(self) -> dict[str, float]:
        """Mean share of updates that bf16 weights would lose, by parameter."""
        lost: dict[str, list[float]] = {}
        for sample in self.run.samples:
            for name, update in sample.weights.items():
                if math.isfinite(update.lost_in_bf16):
                    lost.setdefault(name, []).append(update.lost_in_bf16)
        return {name: sum(shares) / len(shares) for name, shares in lost.items()}

    @cached_property
    def has_16_bit_weights(self) -> bool:
        """Whether some weights are themselves 16-bit, and so have no share in `lost_in_bf16`."""
        updates = (update for sample in self.run.samples for update in sample.weights.values())
        return any(math.isnan(update.lost_in_bf16) for update in updates)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of elements of each parameter whose gradient was sampled."""
        gradients = (pair for sample in self.run.samples for pair in sample.gradients.items())
        return {name: stats.numel for name, stats in gradients}

    def blamed(self, module: str) -> int:
        """Return the number of recorded overflows that name one of the module's own parameters.

        Other causes do not count: after a non-finite loss, the gradients of all modules are NaN.
        """
        return self._blamed[module]

    @cached_property
    def _blamed(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for skips in self.skips:
            if skips.cause == causes.OVERFLOW:
                for parameter, count in skips.parameters:
                    counts[parameter.rpartition(".")[0]] += count
        return counts


def _reads_huge(diagnosis: str) -> bool:
    """Return True if an input of the op is so large that a product of two may overflow in fp32."""
    numbers = re.findall(r"^ *input \d+: .*?\), (\S+) \.\. ([^\s,]+)", diagnosis, re.MULTILINE)
    return any(abs(float(end)) > HUGE for ends in numbers for end in ends)


def _has_nonfinite_gradients(sample: SampleRecord) -> bool:
    return any(stats.nonfinite > 0 for stats in sample.modules.values())
