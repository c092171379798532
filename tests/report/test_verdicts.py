"""Advice: what is said of which numbers, and that the numbers are those that were recorded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.monitor import recorded
from tests.monitor.recorded import sample, step, write

from castwise.amp._schedules import Schedule
from castwise.monitor import FP16, Run
from castwise.monitor._exponents import count, tally
from castwise.monitor._records import SampleRecord, StepRecord
from castwise.report import Advice, Verdict, verdict
from castwise.report._run_facts import Ranges, RunFacts
from castwise.report._skips import STREAK_MATTERS, Finding, assign

# A gradient whose largest number is 2^-6.3: 22.3 bits below 65504.
GOOD = {"a": -16.0, "b": -16.0}
OUTPUTS = {"a": 1.0, "b": 1.0}


def advice_on(run: Path, beginning: str) -> Advice:
    found = [advice for advice in verdict(run) if advice.text.startswith(beginning)]
    assert len(found) == 1, str(verdict(run))
    return found[0]


def samples(scale: float = 2.0**14, n: int = 4, **more: object) -> list[recorded.Record]:
    given = {"gradients": GOOD, "outputs": OUTPUTS, **more}
    return [sample(100 * i, scale, **given) for i in range(1, n + 1)]  # type: ignore[arg-type]  # any of its arguments


def steps(n: int = 400, scale: float | None = 2.0**14) -> list[recorded.Record]:
    return [step(i, scale) for i in range(1, n + 1)]


def ranges_of(gradients: dict[str, torch.Tensor]) -> dict[str, Ranges]:
    record = SampleRecord(1, 1.0, modules={name: tally(count(each)).stats() for name, each in gradients.items()})
    return RunFacts(Run(Path(), samples=[record])).gradients


def log2_of(advice: Advice, name: str) -> float:
    value = advice.evidence[name]
    assert isinstance(value, float)
    return math.log2(value)


def test_fp16_is_safe_where_everything_fits(tmp_path: Path) -> None:
    run = write(tmp_path, *steps(), *samples())
    advice = advice_on(run, "fp16 is safe here at scale 2^14")
    largest = Run.read(run).samples[0].modules["a"].largest
    assert advice.severity == "good"
    assert advice.evidence["headroom_bits"] == pytest.approx(math.log2(65504 / largest) - 14)
    assert advice.evidence["finite_samples"] == 4
    assert advice.evidence["skipped_steps"] == 0
    assert not [piece for piece in verdict(run) if piece.severity in ("critical", "warning")]


def test_the_safe_scales_are_those_at_which_every_gradient_fits(tmp_path: Path) -> None:
    """Against a search through all powers of two, by elements put at the bottom of their bins."""
    run = write(tmp_path, *steps(), *samples(gradients={"a": -20.0, "b": -13.0}))
    record = Run.read(run).samples[0].modules

    def fits(exponent: int) -> bool:
        for stats in record.values():
            values = [(2.0 ** (stats.exponents.lowest + i + exponent), n) for i, n in enumerate(stats.exponents.counts)]
            lost = sum(n for value, n in values if value < 2.0**-25) / stats.numel
            if lost >= 0.05 or stats.largest * 2.0**exponent * 4 > 65504:
                return False
        return True

    safe = [exponent for exponent in range(-40, 40) if fits(exponent)]
    evidence = advice_on(run, "fp16 is safe here").evidence
    assert (evidence["lowest_safe_scale"], evidence["highest_safe_scale"]) == (2.0 ** safe[0], 2.0 ** safe[-1])


def test_a_scale_that_is_too_high_or_too_low_is_reported_by_how_much_to_move(tmp_path: Path) -> None:
    high = advice_on(write(tmp_path / "a", *steps(scale=2.0**22), *samples(2.0**22)), "The scale could be lowered by")
    highest = log2_of(high, "highest_safe_scale")
    assert f"lowered by {22 - highest:.1f} bits to 2^{highest:g}," in high.text
    low = advice_on(write(tmp_path / "b", *steps(scale=2.0**-8), *samples(2.0**-8)), "The scale should be raised")
    lowest, highest = (log2_of(low, f"{end}_safe_scale") for end in ("lowest", "highest"))
    assert f"raised by {lowest + 8:.1f} to {highest + 8:.1f} bits: gradients fit from 2^{lowest:g} to" in low.text


def test_underflow_names_the_module_its_share_and_the_scale_that_helps(tmp_path: Path) -> None:
    run = write(tmp_path, *steps(scale=1.0 / 4), *samples(1.0 / 4, gradients={"a": -16.0, "b": -22.0}))
    share = Run.read(run).samples[0].modules["b"].formats["fp16"].flush
    advice = advice_on(run, "b loses")
    assert 0.25 < share < 0.75
    assert advice.severity == "critical"
    assert advice.evidence["mean_flushed_share"] == pytest.approx(share)
    assert f"loses {float(f'{100 * share:.2g}'):g}% of its gradients" in advice.text
    assert "bf16 or a higher scale" in advice.text


def test_underflow_that_no_safe_scale_cures_asks_for_bf16(tmp_path: Path) -> None:
    run = write(tmp_path, *steps(), *samples(gradients={"a": -8.0, "b": -40.0}))
    text = advice_on(run, "b loses").text
    assert "bf16, because even the highest safe scale, 2^12, loses 89%; a allows no higher one." in text
    assert not [piece for piece in verdict(run) if "No scale fits" in piece.text]  # the same advice again


def test_modules_with_the_same_remedy_are_one_piece_of_advice(tmp_path: Path) -> None:
    fading = {name: -40.0 - 0.1 * place for place, name in enumerate("bcdef")}
    outputs = {"a": 17.0, "b": 6.2, **dict.fromkeys("cd", 1.0)}
    run = write(tmp_path, *steps(), *samples(gradients={"a": -8.0, **fading}, outputs=outputs))
    underflow, near = (piece for piece in verdict(run) if "use bf16" in piece.text)
    assert underflow.text.startswith("f loses ")
    assert ", and so do e (" in underflow.text
    assert "d (" in underflow.text
    assert " and 2 more modules: use bf16, because" in underflow.text
    assert (underflow.severity, underflow.evidence["modules_like_it"]) == ("critical", 4)
    assert near.text == (
        "Outputs of a and b are too large for or near the limit of fp16: keep them in fp32 with "
        'Policy(compute="float16", modules={"a": "float32", "b": "float32"}), or use bf16.'
    )
    assert near.evidence["largest_output"] == Run.read(run).samples[0].activations["a"].largest
    assert near.evidence["modules_like_it"] == 1


def test_gradients_that_fp16_has_cut_off_are_known_by_their_zeros() -> None:
    """Underflow that happened leaves nothing that could underflow: only zeros, and an end at the smallest number."""
    torch.manual_seed(0)
    honest = torch.randn(100_000) * 2.0**-24  # scaled, as a backward in fp32 leaves them
    through_fp16 = honest.to(torch.float16).float()
    lost = ((through_fp16 == 0) & (honest != 0)).float().mean().item()
    for values in (honest, through_fp16):
        assert ranges_of({"head": values})["head"].mean_flush == pytest.approx(lost, abs=0.001)
    ends_by_itself = torch.randn(100_000).abs().clamp_min(0.01)
    ends_by_itself[:50_000] = 0
    nothing = torch.zeros(100)
    assert ranges_of({"embedding": ends_by_itself})["embedding"].mean_flush == 0
    assert ranges_of({"unused": nothing, "embedding": ends_by_itself})["unused"].mean_flush == 0
    beside = ranges_of({"lost": nothing, "head": through_fp16, "embedding": ends_by_itself})
    assert (beside["lost"].mean_flush, beside["embedding"].mean_flush) == (1, 0)


def test_zeros_before_the_first_gradients_are_no_underflow(tmp_path: Path) -> None:
    """A weight that begins as zero hands nothing back at the first step."""
    records = samples()
    vanished = {**records[0]["modules"]["b"], **tally(count(torch.zeros(1 << 16))).stats().to_json()}
    for kind, name in (("modules", "b"), ("gradients", "b.weight")):
        records[0][kind][name] = vanished
    assert advice_on(write(tmp_path / "first", *steps(), *records), "fp16 is safe here").severity == "good"
    records[0], records[1] = samples()[0], {**records[0], "step": 200}
    advice = advice_on(write(tmp_path / "later", *steps(), *records), "b loses up to 100% of its gradients")
    assert advice.evidence["vanished_samples"] == 1


def test_outputs_near_the_limit_name_the_innermost_module_and_a_rule_for_it(tmp_path: Path) -> None:
    outputs = {"": 6.0, "blocks": 6.0, "blocks.1": 6.0, "blocks.2": 1.0}
    run = write(tmp_path, *steps(), *samples(outputs=outputs))
    advice = advice_on(run, "Outputs of")
    assert 'Outputs of blocks.1 are near the limit of fp16: keep it in fp32 with Policy(compute="float16", ' in str(
        advice
    )
    assert 'modules={"blocks.1": "float32"})' in advice.text
    largest = Run.read(run).samples[0].activations["blocks.1"].largest
    assert advice.evidence["largest_output"] == largest
    assert advice.evidence["headroom_bits"] == pytest.approx(math.log2(65504 / largest))
    assert not [piece for piece in verdict(run) if "fp16 is safe" in piece.text]


def test_bf16_weights_are_judged_by_the_updates_they_would_lose(tmp_path: Path) -> None:
    losing = advice_on(
        write(tmp_path / "a", *steps(), *samples(lost_in_bf16=0.12)), "Keep the weights in fp32: bf16 weights"
    )
    assert "would lose 12% of updates" in losing.text
    assert "optimizer = castwise.MasterWeights(optimizer, model)" in losing.text
    assert losing.evidence["lost_updates_share"] == pytest.approx(0.12)
    assert (
        "are fine here" in advice_on(write(tmp_path / "b", *steps(), *samples(lost_in_bf16=0.001)), "bf16 weights").text
    )


def test_of_weights_that_are_16_bit_already_nothing_is_said(tmp_path: Path) -> None:
    records = samples(lost_in_bf16=0.12)
    next(iter(records[0]["weights"].values()))["lost_in_bf16"] = "nan"
    assert not [piece for piece in verdict(write(tmp_path, *steps(), *records)) if "bf16 weights" in piece.text]


def test_skips_are_reported_by_cause_with_the_parameters_named_most(tmp_path: Path) -> None:
    records = steps()
    for at in (50, 250):
        records[at - 1] = step(at, 2.0**14, "overflow", parameters=["head.weight", "a.bias"])
    records[99] = step(100, 2.0**14, "overflow", parameters=["head.weight"])
    records[299] = step(300, 2.0**14, "another rank")
    run = write(tmp_path, *records, *samples())
    advice = advice_on(run, "3 steps skipped for overflow: the normal cost")
    assert advice.evidence["parameters_named_most"] == ("head.weight (3x)", "a.bias (2x)")
    assert (advice.evidence["first_step"], advice.evidence["last_step"]) == (50, 250)
    assert advice_on(run, "1 step skipped: because another rank's").severity == "note"


def test_too_many_overflows_are_a_warning_but_not_those_of_the_warm_up(tmp_path: Path) -> None:
    warm_up = [step(i, 2.0**30, "overflow") for i in range(1, 15)] + steps()[14:]
    assert advice_on(write(tmp_path / "a", *warm_up), "14 steps skipped for overflow").severity == "note"
    often = [step(i, 2.0**14, "overflow" if i % 50 == 0 else None) for i in range(1, 401)]
    assert advice_on(write(tmp_path / "b", *often), "Gradient overflow cost 2% of all steps").severity == "warning"


def test_losses_that_are_not_finite_clear_the_scale(tmp_path: Path) -> None:
    records = steps()
    records[6] = step(7, 2.0**14, "non-finite loss", loss="nan")
    advice = advice_on(write(tmp_path, *records), "The loss was inf or NaN at 1 step, first at step 7")
    assert "the forward or the data, not the scale" in advice.text
    taken = [step(i, None, loss="inf" if i == 9 else 1.0) for i in range(1, 20)]
    assert advice_on(write(tmp_path / "b", *taken), "The loss was inf or NaN at 1 step").evidence["first_step"] == 9


def test_weights_that_are_not_finite_are_the_end(tmp_path: Path) -> None:
    records = [*steps(9), *(step(i, 2.0**14, "non-finite weights", parameters=["a.weight"]) for i in range(10, 12))]
    advice = next(iter(verdict(write(tmp_path, *records))))
    assert advice.severity == "critical"
    assert advice.text.startswith("Training is lost from step 10 on")


def test_a_scale_that_goes_down_without_end_is_critical(tmp_path: Path) -> None:
    falling = [step(i, 2.0 ** (17 - i), "overflow") for i in range(1, 25)]
    advice = advice_on(write(tmp_path, *falling), "The scale collapsed to 2^-7 at step 24")
    assert advice.severity == "critical"
    assert advice.evidence["longest_row_of_skipped_steps"] == 24
    held = [step(i, 2.0**7, "non-finite loss", loss="nan") for i in range(3, 23)]
    assert "20 steps in a row were skipped from step 3 on" in str(verdict(write(tmp_path / "b", *steps(2), *held)))
    assert "collapsed" not in str(verdict(write(tmp_path / "c", *steps(30, scale=0.5))))


def test_overflows_that_ended_at_a_lower_scale_ask_to_start_lower(tmp_path: Path) -> None:
    falling = [step(i, 2.0 ** (41 - i), "overflow") for i in range(1, 24)]
    found = verdict(write(tmp_path, *falling, *(step(i, 2.0**17) for i in range(24, 30))))
    assert (
        "The first 23 steps were skipped for overflow, until the scale had dropped to 2^17: start with a lower scale."
        in str(found)
    )
    assert "No scale helps" not in str(found)


def test_overflows_at_every_scale_get_no_advice_to_start_lower(tmp_path: Path) -> None:
    falling = [step(i, 2.0 ** (17 - i), "overflow") for i in range(1, 41)]
    found = str(verdict(write(tmp_path, *falling, *samples())))
    assert "No scale helps" in found
    assert "start lower" not in found
    assert "suits" not in found


def test_skips_are_a_usual_price_only_once_a_step_was_taken(tmp_path: Path) -> None:
    skips = [step(i, 2.0 ** (17 - i), "overflow") for i in range(1, 7)]
    assert "none was taken since" in advice_on(write(tmp_path / "a", *skips), "6 steps skipped for overflow").text
    taken = (step(i, 2.0**10) for i in range(7, 9))
    assert "normal cost" in advice_on(write(tmp_path / "b", *skips, *taken), "6 steps skipped for overflow").text


def test_losses_of_steps_that_were_skipped_for_their_weights_are_not_reported_again(tmp_path: Path) -> None:
    killed = [step(i, 2.0**14, "non-finite weights", loss="nan") for i in range(10, 20)]
    assert "The loss was" not in str(verdict(write(tmp_path, *steps(9), *killed)))


def diagnosis(at: int, cause: str, module: str = "", **more: str) -> recorded.Record:
    fields = {"phase": "forward", "op": "aten.bmm", "text": f"{module} overflowed.\nkeep it", "advice": "keep it"}
    return {"kind": "diagnosis", "step": at, "cause": cause, "module": module, **fields, **more}


def test_a_bad_batch_is_one_warning_with_its_diagnosis(tmp_path: Path) -> None:
    advice = "drop or repair such samples"
    found = diagnosis(3, "non-finite loss", text=f"input: input 0 is nan\n  a range\n{advice}", advice=advice)
    bad = step(3, 2.0**14, "non-finite loss", loss="nan")
    broken = sample(3, 2.0**14, GOOD, OUTPUTS, not_finite=("a", "b"))
    broken["activations"] = broken["modules"]
    run = write(tmp_path / "a", *steps(2), bad, found, broken, *steps(400)[3:], *samples())
    warnings = [piece for piece in verdict(run) if piece.severity == "warning"]
    assert [piece.finding.split(",")[0] for piece in warnings] == ["The loss was inf or NaN at 1 step"]
    assert warnings[0].text.endswith("Step 3: input: input 0 is nan Drop or repair such samples.")
    assert "castwise.diagnose" not in str(verdict(run))
    (cause,) = warnings[0].diagnosed
    assert (cause.advice, cause.details) == (advice, "a range")
    alone = write(tmp_path / "b", *steps(2), bad, broken, *steps(400)[3:], *samples())
    warning = advice_on(alone, "The loss was inf or NaN")
    assert "castwise.diagnose" in warning.text
    assert warning.evidence["first_module_not_finite"] == "a"


def test_outputs_that_are_not_finite_are_reported_where_no_skip_tells_it(tmp_path: Path) -> None:
    broken = sample(150, 2.0**14, GOOD, OUTPUTS, not_finite=("a",))
    broken["activations"] = broken["modules"]
    run = write(tmp_path, *steps(), *samples(n=1), broken, *samples()[1:])
    assert advice_on(run, "Outputs of a were inf or NaN").severity == "warning"


def test_outputs_that_are_not_finite_after_a_diagnosed_fault_are_its_consequence(tmp_path: Path) -> None:
    def pieces(at: int, is_diagnosed: bool, skipped: bool) -> list[str]:
        fault = step(at, 2.0**14, "non-finite loss", skipped=skipped)
        records = [fault if each["step"] == at else each for each in steps()]
        found = [diagnosis(at, "non-finite loss", "b")] * is_diagnosed
        broken = sample(150, 2.0**14, GOOD, OUTPUTS, not_finite=("a",))
        broken["activations"] = broken["modules"]
        run = write(tmp_path, *records, *samples(n=1), broken, *samples()[1:], *found)
        return [each.finding for each in verdict(run) if each.finding.startswith("Outputs of a were inf or NaN")]

    assert not pieces(140, is_diagnosed=True, skipped=False)
    assert pieces(140, is_diagnosed=False, skipped=False)
    assert pieces(140, is_diagnosed=True, skipped=True)  # its weights were kept
    assert pieces(160, is_diagnosed=True, skipped=False)


def test_an_overflow_of_a_scale_that_is_sought_is_one_note_without_a_remedy(tmp_path: Path) -> None:
    found = diagnosis(1, "overflow", "a", advice="lower the scale: this op needs 2^13")
    run = write(tmp_path, step(1, 2.0**15, "overflow"), found, *steps(400)[1:], *samples())
    assert [piece.severity for piece in verdict(run) if "overflow" in piece.finding and "skipped" in piece.text] == [
        "note"
    ]
    advice = advice_on(run, "1 step skipped for overflow: the normal cost")
    assert advice.text.endswith("finding the scale. Step 1: a overflowed.")


def test_an_overflow_that_no_scale_mends_is_one_warning_with_the_first_and_the_last_diagnosis(tmp_path: Path) -> None:
    skips = {at: step(at, 2.0**14, "overflow") for at in (10, 20, 30, 40)}
    records = [skips.get(each["step"], each) for each in steps()]
    found = [diagnosis(at, "overflow", f"blocks.{at // 20}") for at in skips]
    advice = advice_on(
        write(tmp_path, *records, *found), "4 steps skipped for overflow, and a lower scale does not help."
    )
    assert advice.severity == "warning"
    assert [(each.at, each.module) for each in advice.diagnosed] == [("Step 10", "blocks.0"), ("Step 40", "blocks.2")]


def test_diagnoses_of_steps_without_a_record_are_reported(tmp_path: Path) -> None:
    found = [diagnosis(at, "overflow", "blocks.3.attn", advice="Keep it in fp32.") for at in (10, 20)]
    advice = advice_on(
        write(tmp_path, *steps(), *found), "Steps were skipped: overflow. 2 steps from 10 to 20: blocks.3"
    )
    assert (advice.evidence["module"], advice.evidence["diagnosed_steps"]) == ("blocks.3.attn", 2)


def test_a_collapse_with_a_diagnosis_begins_with_the_cause_and_its_remedy(tmp_path: Path) -> None:
    falling = [step(i, 2.0 ** (17 - i), "overflow") for i in range(1, 41)]
    run = write(tmp_path, *falling, diagnosis(1, "overflow", "head", advice="keep head in fp32"))
    first, *others = verdict(run)
    assert first.finding.startswith(
        "head overflowed. Keep head in fp32. The scale collapsed to 2^-23 at step 40; below"
    )
    assert first.text == first.finding
    assert [each.module for each in first.diagnosed] == ["head"]
    assert not [piece for piece in others if "skipped" in piece.text]


# -- divergence ------------------------------------------------------------------------------------------------------


def diverged(losses: list[float], norms: list[float] | None = None, skips: int = 6, **more: Any) -> list[Any]:
    norms = norms or [1.0] * len(losses)
    taken = [
        step(i, 2.0**14, loss=loss, grad_norm=norm, **more)
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)
    ]
    begun = len(losses) + 1
    return [*taken, *(step(i, 2.0**13, "overflow", loss="nan", grad_norm="inf") for i in range(begun, begun + skips))]


def test_a_loss_that_grows_by_orders_of_magnitude_before_steps_fail_is_divergence(tmp_path: Path) -> None:
    records = diverged([1.8, 1.7, 1.76, 6.5, 100.0, 8276.0])
    found = [diagnosis(7, "overflow", "blocks.0.attn"), diagnosis(12, "overflow", "head")]
    run = write(tmp_path, *records, *samples(outputs={"a": 16.5, "b": 1.0}), *found, **{"learning rate": 3.0})
    (advice,) = verdict(run)
    assert advice.severity == "critical"
    assert advice.finding == (
        "Training diverged: the loss grew from 1.76 at step 3 to 8,276 at step 6, and 6 steps failed from step 7 on. "
        "Lower the learning rate (initially 3), warm it up, or clip the gradient norm. "
        "As a consequence, this overflowed first and last:"
    )
    assert (advice.evidence["growth_steps"], advice.evidence["learning_rate"]) == (3, 3.0)
    assert [each.module for each in advice.diagnosed] == ["blocks.0.attn", "head"]
    assert "keep it" not in str(advice.text).replace("overflowed. keep it", "")


def test_a_gradient_norm_that_grows_is_divergence_unless_the_loss_falls(tmp_path: Path) -> None:
    norms = [1.0, 1.5, 90.0, 4e5]
    assert advice_on(
        write(tmp_path / "a", *diverged([2.0, 2.0, 2.1, 3.0], norms)), "Training diverged: the gradient norm"
    )
    assert "diverged" not in str(verdict(write(tmp_path / "b", *diverged([2.0, 1.9, 1.8, 1.7], norms))))


def test_the_norms_of_samples_tell_of_divergence_where_nothing_was_clipped(tmp_path: Path) -> None:
    records = [{**each, "grad_norm": None} for each in diverged([2.0, 2.0, 2.1, 3.0])]
    norms = [{**each, "grad_norm": norm} for each, norm in zip(samples(n=4), [1.0, 1.5, 90.0, 4e5], strict=True)]
    run = write(tmp_path, *records, *({**each, "step": at} for at, each in enumerate(norms, 1)))
    advice = advice_on(run, "Training diverged: the gradient norm grew from 1.5 at step 2 to 4e+05 at step 4")
    assert advice.severity == "critical"


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([2.0] * 20, id="steady"),
        pytest.param([10.0 * 0.5**i for i in range(20)] + [1e-3, 1e-2], id="some of what was learnt is lost"),
        pytest.param([2.0, 2.0, 2.0, 5000.0, 2.1, 2.0], id="one bad batch"),
    ],
)
def test_what_is_no_divergence(losses: list[float], tmp_path: Path) -> None:
    assert "diverged" not in str(verdict(write(tmp_path, *diverged(losses))))


def test_a_loss_that_grows_in_a_run_without_failed_steps_is_not_judged(tmp_path: Path) -> None:
    assert "diverged" not in str(verdict(write(tmp_path, *diverged([2.0, 2.0, 2.0, 5000.0, 1e6], skips=0))))


def test_a_loss_that_grows_slowly_while_the_scale_is_probed_is_no_divergence(tmp_path: Path) -> None:
    records = [
        step(i, 2.0**14, "overflow" if i % 200 == 0 else None, loss=0.01 * 1.01**i, grad_norm=1.0)
        for i in range(1, 600)
    ]
    assert "diverged" not in str(verdict(write(tmp_path, *records)))


def taken_and_skipped(*losses: float, skipped: str) -> list[recorded.Record]:
    """Steps with these losses, one for each letter: "." was taken, "x" was skipped."""
    causes = [
        None if each == "." else "overflow" if math.isfinite(loss) else "non-finite loss"
        for loss, each in zip(losses, skipped, strict=True)
    ]
    return [step(i, 2.0**14, cause, loss=loss) for i, (loss, cause) in enumerate(zip(losses, causes, strict=True), 1)]


@pytest.mark.parametrize(
    ("losses", "skipped", "grew", "failed"),
    [
        (
            [3.1, 1.6, 12.5, 12.4, 12.3, 9.8, *[math.nan] * 50],
            "..xxx." + 50 * "x",
            "1.6 at step 2 to 12.5 at step 3",
            "53 steps failed from step 3 on",
        ),
        (
            [3.0, 2.2, 2.3, 22.2, 23.1, 20.7, *[math.nan] * 9],
            ".x.xx." + 9 * "x",
            "2.3 at step 3 to 22.2 at step 4",
            "11 steps failed from step 4 on",
        ),
        ([3.1, 1.2, 2.4, 2.0, 11.7], "..x.x", "2 at step 4 to 11.7 at step 5", "1 step failed from step 5 on"),
        (
            [3.1, 1.2, 2.4, 2.0, 11.7, 11.1, 14.5, math.nan],
            "..x.xx.x",
            "2 at step 4 to 11.7 at step 5",
            "3 steps failed from step 5 on",
        ),
        (
            [3.1, 1.2, 2.0, 11.7, math.nan, math.nan, 1.2e4, *[math.nan] * 9],
            "...xxxx" + 9 * "x",
            "2 at step 3 to 11.7 at step 4",
            "13 steps failed from step 4 on",
        ),
    ],
)
def test_a_loss_that_multiplies_within_the_last_few_updates_is_divergence(
    losses: list[float], skipped: str, grew: str, failed: str, tmp_path: Path
) -> None:
    """The figures are those up to the first failure: later ones are of a model that is lost already."""
    run = write(tmp_path, *taken_and_skipped(*losses, skipped=skipped))
    first, *others = verdict(run)
    assert first.finding.startswith(f"Training diverged: the loss grew from {grew}, and {failed}. Lower")
    assert "the cause is the forward or the data" not in "".join(map(str, others))


def test_an_update_larger_than_the_weights_after_which_all_steps_fail_is_divergence(tmp_path: Path) -> None:
    records = taken_and_skipped(3.1, *[math.nan] * 9, skipped="." + 9 * "x")
    found = diagnosis(2, "non-finite loss", "blocks.0.attn")
    text_at = {}
    for ratio in (0.01, 71.0):
        first = sample(1, 2.0**14, GOOD, OUTPUTS)
        first["weights"] = {name: {**each, "update_to_weight": ratio} for name, each in first["weights"].items()}
        text_at[ratio] = str(verdict(write(tmp_path / str(ratio), *records, first, found)))
    assert "Training diverged: the update of step 1 was 71 times as large as the weights" in text_at[71.0]
    assert "keep it" not in text_at[71.0].replace("overflowed. keep it", "")
    assert "diverged" not in text_at[0.01]


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_grow_by_design_are_no_divergence_and_hide_no_bad_batch(sign: int, tmp_path: Path) -> None:
    bad, overflows = (40, 70), (20, 30, 39, 61)
    causes = dict.fromkeys(bad, "non-finite loss") | dict.fromkeys(overflows, "overflow")
    records = [
        step(i, 2.0**10, causes.get(i), loss=math.nan if i in bad else sign * 1.1**i, grad_norm=2 * 1.1**i)
        for i in range(1, 101)
    ]
    found = verdict(write(tmp_path, *records))
    assert "diverged" not in str(found)
    assert "The loss was inf or NaN at 2 steps, first at step 40" in str(found)


def test_a_bad_batch_from_before_the_divergence_is_reported_with_its_diagnosis(tmp_path: Path) -> None:
    losses = [*[2.0] * 9, math.nan, *[2.0] * 9, 12.0, *[math.nan] * 9]
    records = taken_and_skipped(*losses, skipped=9 * "." + "x" + 9 * "." + 10 * "x")
    found = [diagnosis(10, "non-finite loss", "emb"), diagnosis(20, "overflow", "head")]
    first, second, *_ = verdict(write(tmp_path, *records, *found))
    assert first.text.endswith("As a consequence, this overflowed first: Step 20: head overflowed.")
    assert second.finding.startswith("The loss was inf or NaN at 1 step, first at step 10")
    assert second.text.endswith("Step 10: emb overflowed. Keep it.")


def test_what_overflowed_first_is_called_a_consequence_of_divergence(tmp_path: Path) -> None:
    found = [diagnosis(7, "overflow", "blocks.0.attn"), diagnosis(12, "overflow", "head")]
    (advice, *_) = verdict(write(tmp_path, *diverged([1.8, 1.7, 1.76, 6.5, 100.0, 8276.0]), *found))
    assert "As a consequence, this overflowed first and last: Step 7: blocks.0.attn overflowed. Step 12: head" in (
        advice.text
    )


def test_overflows_from_before_the_divergence_are_still_the_usual_price(tmp_path: Path) -> None:
    search = [step(i, 2.0 ** (20 - i), "overflow") for i in (1, 2)]
    later = [{**each, "step": each["step"] + 2} for each in diverged([1.8, 1.7, 1.76, 6.5, 100.0, 8276.0])]
    run = write(tmp_path, *search, *later)
    assert advice_on(run, "2 steps skipped for overflow: the normal cost").evidence["last_step"] == 2


def test_too_little_data_is_said_and_no_format_judged(tmp_path: Path) -> None:
    for name, records in {"empty": [], "short": [*steps(5), *samples(n=2)]}.items():
        found = verdict(write(tmp_path / name, *records))
        nothing = ["Nothing to fix"] if name == "short" else []
        expected = [*nothing, "Too little was recorded to judge a format"]
        assert [advice.text.split(":")[0] for advice in found] == expected


@pytest.mark.parametrize(("finite", "text_at"), [(0, "none"), (2, "2")])
def test_more_steps_are_not_asked_for_where_all_were_sampled_and_not_finite(
    finite: int, text_at: str, tmp_path: Path
) -> None:
    broken = [sample(i, 2.0**14, GOOD, OUTPUTS, not_finite=tuple(GOOD)) for i in range(finite + 1, 21)]
    kept = [sample(i, 2.0**14, GOOD, OUTPUTS) for i in range(1, finite + 1)]
    taken = [step(i, 2.0**14, None if i <= finite else "non-finite loss") for i in range(1, 21)]
    advice = advice_on(write(tmp_path, *taken, *kept, *broken), "No format can be judged")
    assert advice.text == (
        f"No format can be judged: of 20 samples, {text_at} had only finite gradients, and 3 such samples are needed. "
        "First find where inf and NaN come from."
    )
    assert advice.evidence == {"finite_samples": finite, "taken_samples": 20, "recorded_steps": 20}


def test_a_run_without_scaling_learns_what_fp16_would_need(tmp_path: Path) -> None:
    run = write(tmp_path, *steps(scale=None), *samples(1.0))
    assert advice_on(run, "The loss was not scaled. In fp16, gradients fit from 2^").severity == "note"
    wide = write(tmp_path / "wide", *steps(scale=None), *samples(1.0, gradients={"a": 8.0, "b": -40.0}))
    assert advice_on(wide, "In fp16, no scale would fit all gradients: b needs at least 2^").severity == "note"
    assert "use bf16" not in str(verdict(wide)).lower()


def test_samples_that_are_not_finite_count_nowhere_else(tmp_path: Path) -> None:
    broken = sample(500, 2.0**14, {**GOOD, "b": 60.0}, OUTPUTS, not_finite=("b",))
    ranges = RunFacts(Run.read(write(tmp_path, *steps(), *samples(), broken))).gradients["b"]
    assert (ranges.samples, ranges.nonfinite_samples) == (4, 1)
    assert ranges.largest < 1


def test_the_most_severe_advice_comes_first_and_all_of_it_has_numbers(tmp_path: Path) -> None:
    found = verdict(recorded.troubled(tmp_path, steps=3000, layers=2))
    order = ["critical", "warning", "note", "good"]
    ranks = [order.index(advice.severity) for advice in found]
    assert ranks == sorted(ranks)
    assert len(ranks) > 4
    for advice in found:
        assert any(isinstance(value, (int, float)) for value in advice.evidence.values()), advice


def test_a_verdict_prints_its_evidence_with_units() -> None:
    evidence = {"lost_share": 0.312, "headroom_bits": 2.345, "last_scale": 2.0**16, "bad_steps": 1200, "in": "a.b"}
    printed = str(Verdict((Advice("Do this.", evidence, "warning"),)))
    assert printed == "warning: Do this. (lost: 31%; headroom bits: 2.3; last scale: 2^16; bad steps: 1,200; in: a.b)"


def test_thresholds_are_those_of_fp16() -> None:
    assert FP16.largest == torch.finfo(torch.float16).max
    assert 2.0**FP16.smallest_subnormal_exponent == torch.finfo(torch.float16).smallest_normal * 2.0**-10


def test_a_row_of_skips_matters_from_where_a_scaler_warns() -> None:
    assert Schedule.patience == STREAK_MATTERS


CAUSES = ["overflow", "non-finite loss", "non-finite weights", "another rank", "unknown", None]
SKIPS = CAUSES[:5]


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(CAUSES), max_size=30), st.lists(st.sampled_from(CAUSES[:5]), max_size=30), st.booleans()
)
def test_each_skipped_step_belongs_to_exactly_one_finding(
    some: list[str | None], at_end: list[str | None], diverges: bool
) -> None:
    causes = [*some, None, *at_end]
    records = [
        StepRecord(number, scale=2.0, skipped=cause is not None, cause=cause)
        for number, cause in enumerate(causes, start=1)
    ]
    findings = assign(records, len(some) // 2 if diverges else None)
    assigned = [step for groups in findings.values() for skips in groups for step in skips.steps]
    assert sorted(assigned) == [record.step for record in records if record.skipped]
    assert {skips.cause for skips in findings[Finding.LOST_WEIGHTS]} <= {"non-finite weights"}
    if len(at_end) >= STREAK_MATTERS and not diverges:
        row = {step for skips in findings[Finding.ENDLESS_ROW] for step in skips.steps}
        assert row == {r.step for r in records[len(some) + 1 :] if r.cause != "non-finite weights"}


def test_a_row_at_the_end_is_not_counted_again_and_names_its_causes(tmp_path: Path) -> None:
    bad = [step(number, 2.0**14, "non-finite loss", loss="nan") for number in (3, 9)]
    end = [step(number, 2.0**14, "unknown") for number in range(60, 90)]
    end[3:5] = [step(number, 2.0**14, "non-finite loss", loss="nan") for number in (63, 64)]
    taken = [step(number, 2.0**14) for number in range(1, 60) if number not in (3, 9)]
    run = write(tmp_path, *sorted([*bad, *taken], key=lambda record: record["step"]), *end)
    assert advice_on(run, "The loss was inf or NaN").evidence["skipped_steps"] == 2
    assert advice_on(run, "30 steps in a row").evidence["causes"] == ("unknown (28x)", "non-finite loss (2x)")
    assert not [advice for advice in verdict(run) if advice.text.startswith("28 steps skipped")]


# -- without a scaler -------------------------------------------------------------------------------------------------


def unscaled(number: int, **fields: Any) -> dict[str, Any]:
    return step(number, None, **{"loss": 1.0, "skipped": False, **fields})


def fault(number: int, phase: str, **fields: str) -> dict[str, Any]:
    known = {"module": "", "op": "aten.log", "text": f"{phase}: ...", "advice": "clamp it", "summary": "Log of 0."}
    return {"kind": "diagnosis", "step": number, "cause": "non-finite loss", "phase": phase, **known, **fields}


def test_a_healthy_run_has_nothing_to_fix(tmp_path: Path) -> None:
    found = verdict(write(tmp_path, *(unscaled(number) for number in range(1, 61)), *samples()))
    assert found.advice[0].severity == "good"
    assert found.advice[0].finding.startswith("Nothing to fix: 60 steps, and no loss")


def test_a_run_with_a_mistake_is_not_called_healthy(tmp_path: Path) -> None:
    mistake = dict.fromkeys(("name", "text", "corrected", "file", "source"), "x") | {"kind": "mistake", "line": 1}
    found = verdict(write(tmp_path, *(unscaled(number) for number in range(1, 61)), *samples(), mistake))
    assert not any("Nothing to fix" in piece.finding for piece in found)


def test_a_step_that_was_taken_with_a_nan_loses_the_training_and_is_diagnosed(tmp_path: Path) -> None:
    lost = [unscaled(number, loss="nan", cause="non-finite weights") for number in range(8, 12)]
    first = unscaled(7, loss="nan", cause="non-finite loss")
    first_finding = verdict(
        write(tmp_path, *(unscaled(number) for number in range(1, 7)), first, fault(7, "forward"), *lost)
    ).advice[0]
    assert first_finding.severity == "critical"
    assert first_finding.text.startswith(
        "Training is lost from step 7 on: the loss was inf or NaN, and the step was taken. Resume from a checkpoint of "
        "step 6 or earlier."
    )
    guard = 'castwise run --guard, or in code castwise.GradScaler("cpu", schedule=castwise.schedules.Guard()).'
    assert first_finding.text.endswith(f"Step 7: Log of 0. Clamp it. To skip such steps: {guard}")


def test_a_first_fault_of_the_loss_or_the_data_is_no_divergence(tmp_path: Path) -> None:
    grown = [unscaled(number, loss=10.0 ** max(0, number - 20)) for number in range(1, 24)]
    lost = [unscaled(number, loss="nan", cause="non-finite loss") for number in range(24, 40)]
    for name, diagnosed in {
        "none": (),
        "forward": (fault(24, "forward", remedy="float32"),),
        "huge": (fault(24, "loss", text="loss: ...\n  input 0: float32 (2,), -1 .. 3e+20"),),
    }.items():
        assert "Training diverged" in verdict(write(tmp_path / name, *grown, *diagnosed, *lost)).advice[0].finding
    for phase, remedy in (("loss", "code"), ("input", "input"), ("forward", "code")):
        found = verdict(write(tmp_path / f"{phase} {remedy}", *grown, fault(24, phase, remedy=remedy), *lost))
        assert not any("diverged" in piece.finding for piece in found)


def test_what_grows_only_at_the_fault_is_no_divergence(tmp_path: Path) -> None:
    healthy = [unscaled(number, grad_norm=1.0) for number in range(1, 24)]
    lost = [unscaled(number, loss="nan", grad_norm=1e9, cause="non-finite loss") for number in range(24, 40)]
    assert not any("diverged" in piece.finding for piece in verdict(write(tmp_path, *healthy, *lost)))


def test_overflows_now_and_then_are_no_warning(tmp_path: Path) -> None:
    for late, severity in {2: "note", 6: "warning"}.items():
        at = {20 + 15 * place for place in range(late)}
        records = [step(i, 2.0**14, "overflow") if i in at else step(i, 2.0**14) for i in range(1, 121)]
        overflows = next(
            piece for piece in verdict(write(tmp_path / str(late), *records)) if "overflow" in piece.finding
        )
        assert overflows.severity == severity


def test_a_loss_that_stays_after_updates_as_large_as_the_weights_is_reported(tmp_path: Path) -> None:
    for ratio, is_reported in {3.0: True, 0.01: False}.items():
        weights = {"a.weight": {"update_to_weight": ratio, "lost_in_bf16": 0.0}}
        sample = {"kind": "sample", "step": 1, "scale": 1.0, "weights": weights}
        records = [unscaled(number, loss=1.4 if number != 2 else 30.0) for number in range(1, 101)]
        found = verdict(write(tmp_path / str(ratio), *records, sample))
        assert any("The loss has not fallen" in piece.finding for piece in found) is is_reported
