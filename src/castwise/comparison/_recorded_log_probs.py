"""`compare_log_probs`: log-probabilities that an engine recorded, beside those of the model that is trained."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import nn

from castwise._frames import new_frame
from castwise._notebook import notebook_progress
from castwise._number_text import percent, several
from castwise._shown import Block, Shown, Table
from castwise.comparison._drift import Drift
from castwise.comparison._log_probs import LogProbDrift, LogProbSums, logits_of, token_log_probs
from castwise.comparison._precision_drift import CLIP_BAND, checked_band, compare, unwrapped
from castwise.comparison._precisions import Precision, temporarily_bound
from castwise.comparison._token_records import TokenRecord, read_records
from castwise.policy._bound_policy import BoundPolicy
from castwise.policy._policy import Policy

if TYPE_CHECKING:
    import pandas

_IGNORED = -100
_FIRST_POSITIONS = 16  # tokens in the first group of positions; each group is twice as long as the one before
_SHOWN = 8
_MORE = 1.5  # what a precision changes, over the difference of records that were made in it; 1 on average


@dataclass(frozen=True)
class PrecisionShare:
    """How much of the difference rounding explains.

    Rounding errors of two implementations of one precision are different numbers of the same size. So sizes are
    compared, as root mean squares over tokens, and not differences token by token: where precision and the engine's
    other differences are independent, their squares add up.

    Args:
        recorded: Root mean square of `log r` between the record and the model, in nats.
        precision: The same between the model under the engine's precision and the model.
    """

    recorded: float
    precision: float

    @property
    def share(self) -> float:
        """The share of the mean square that precision explains, from 0 to 1."""
        share = (self.precision / self.recorded) ** 2 if self.recorded else 1.0
        return share if math.isnan(share) else min(1.0, share)

    @property
    def left(self) -> float:
        """The root mean square that is left for the engine, in nats."""
        return math.sqrt(max(0.0, self.recorded**2 - self.precision**2))


@dataclass(frozen=True, repr=False)
class RecordedDrift(Shown):
    """Recorded log-probabilities, compared with a model's; prints as tables.

    With r = p_model / p_recorded of each recorded token.

    Args:
        summary: Figures over all recorded tokens.
        sequences: Figures of each sequence by its index in the records, by mean difference, largest first.
        positions: Figures by groups of positions, as (first, last) from 0 at the first recorded token of a sequence.
        tokens: Figures by token id, by the sum of differences, largest first.
        best_differs: Share of positions with recorded likeliest tokens where the model's likeliest token is another;
            None if they were not recorded.
        experts: Share of recorded tokens whose set of experts is another, by the router's name.
        precision: How much rounding explains; None unless `engine` was given.
        drift: The result of `compare` on the sequences with the largest differences, module by module; None unless
            `engine` was given.
    """

    summary: LogProbDrift
    sequences: Mapping[int, LogProbDrift]
    positions: Mapping[tuple[int, int], LogProbDrift]
    tokens: Mapping[int, LogProbDrift]
    best_differs: float | None = None
    experts: Mapping[str, float] = field(default_factory=dict)
    precision: PrecisionShare | None = None
    drift: Drift | None = None

    def __repr__(self) -> str:
        return f"RecordedDrift({self.headline()})"

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with a row for each sequence: its index, and the figures of `LogProbDrift`.

        Raises:
            ImportError: pandas is not installed; it comes with `castwise[pandas]`.
        """
        figures = ("tokens", "mean_difference", "largest_difference", "kl_k1", "kl_k3", "outside_band")
        rows = [(index, *(getattr(found, name) for name in figures)) for index, found in sorted(self.sequences.items())]
        return new_frame(("sequence", *figures), rows)

    def headline(self) -> str:
        """Return the figures of all tokens in one line."""
        found, (low, high) = self.summary, self.summary.band
        return (
            f"{several(found.tokens, 'token')} of {several(len(self.sequences), 'sequence')}: mean |log ratio| "
            f"{found.mean_difference:.3g}, largest {found.largest_difference:.3g}, KL {found.kl_k3:.3g} (k3), "
            f"{found.kl_k1:.3g} (k1), {percent(found.outside_band)} outside {low:g} .. {high:g}"
        )

    def _explained(self, by: PrecisionShare) -> str:
        if by.precision > _MORE * by.recorded:
            return (
                f"the precision of `engine` alone changes {by.precision:.3g} nats, and the records differ by "
                f"{by.recorded:.3g}: they were not made in this precision"
            )
        return (
            f"precision explains {percent(by.share)} of the mean square: {by.precision:.3g} of {by.recorded:.3g} nats "
            f"(root mean squares of the log ratio); {by.left:.3g} are left for the engine"
        )

    def _blocks(self) -> Iterator[Block]:
        yield self.headline()
        if self.precision is not None:
            yield self._explained(self.precision)
        yield Table(
            [("positions", *_HEADER), *((f"{a} .. {b}", *_row(found)) for (a, b), found in self.positions.items())],
            range(1, 20),
        )
        for name, found_by in (("sequence", self.sequences), ("token", self.tokens)):
            worst = ((str(key), *_row(found)) for key, found in islice(found_by.items(), _SHOWN))
            yield Table([(name, *_HEADER), *worst], range(20), f"by {name}")
        if self.best_differs is not None:
            yield f"the likeliest token differs at {percent(self.best_differs)} of positions"
        if self.experts:
            rows_of_experts = [(name, percent(share)) for name, share in self.experts.items()]
            yield Table([("router", "other experts"), *rows_of_experts], {1}, "tokens whose experts differ")
        if self.drift is not None:
            which = several(self.drift.batches, "sequence")
            yield f"what the precision of `engine` alone changes, in the {which} with the largest differences:"
            yield from self.drift._blocks()


_HEADER = ("tokens", "mean |log ratio|", "largest", "KL k1", "KL k3", "outside band")


def _row(found: LogProbDrift) -> tuple[str, ...]:
    values = (found.mean_difference, found.largest_difference, found.kl_k1, found.kl_k3)
    return (f"{found.tokens:,}", *(f"{value:.3g}" for value in values), percent(found.outside_band))


def compare_log_probs(
    model: nn.Module,
    records: Any,
    *,
    policy: Policy | BoundPolicy | None = None,
    engine: Policy | BoundPolicy | None = None,
    forward: Callable[[nn.Module, torch.Tensor], Any] | None = None,
    clip_band: tuple[float, float] = CLIP_BAND,
    worst: int = 4,
) -> RecordedDrift:
    """Compare log-probabilities that an inference engine recorded with those of a model.

    The model runs once on each sequence, alone and without padding, in inference mode; weights and random states do not
    change.

    Args:
        model: The model, in evaluation mode. It maps token ids of shape (1, tokens) to logits of shape (1, tokens,
            classes), or to an object or mapping with `logits`, or to a tuple that begins with them.
        records: A file of JSON lines, which may be compressed as `.gz`, or a list of mappings or `TokenRecord`
            objects, with the fields of `TokenRecord`; or a data frame with a row for each token and the columns
            `sequence`, `token`, `log_prob`, and optionally `top` and `experts`, which hold a mapping for each token.
        policy: The precision of the trainer; None runs the model as it is, in the caller's autocast region.
        engine: The precision of the engine, such as `castwise.policies.bf16`. With it, the model is also run in that
            precision, and compared module by module on the sequences with the largest differences. `compare` then has
            `policy`, or float32, as its reference.
        forward: Computes the output from the model and token ids of shape (1, tokens), for models with other arguments.
        clip_band: The smallest and largest ratio that a clipped objective does not clip.
        worst: Number of sequences for the comparison by module.

    Raises:
        OSError: The file cannot be read.
        TypeError: An argument has the wrong type, or the model returns no logits.
        ValueError: A record is malformed, a token is not a class of the model, an expert is none of its router's, a
            router is not a module of the model, returns neither scores of shape (..., experts) nor ids of experts, or
            returns scores to which a bias is added, `clip_band` or `worst` is out of range, or the model is in training
            mode.

    Example:
        >>> import castwise
        >>> model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).eval()
        >>> tokens = [3, 1, 4, 1, 5]
        >>> recorded = model(torch.tensor([tokens])).log_softmax(-1)[0, :-1].gather(1, torch.tensor([tokens[1:]]).T)
        >>> record = {"tokens": tokens, "log_probs": [None, *recorded.flatten().tolist()]}
        >>> castwise.compare_log_probs(model, [record]).summary.tokens
        4
    """
    model = unwrapped(model)
    if model.training:
        raise ValueError("the model is in training mode, in which dropout changes log-probabilities: call model.eval()")
    if isinstance(worst, bool) or not isinstance(worst, int) or worst < 1:
        raise ValueError(f"worst must be an integer >= 1, got {worst!r}")
    for name, given in (("policy", policy), ("engine", engine)):
        if not isinstance(given, (Policy, BoundPolicy, type(None))):
            raise TypeError(f"{name} must be a policy, such as castwise.policies.bf16, got {given!r}")
    read, call, sums = read_records(records), forward or _called, _Sums(checked_band(clip_band))
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    with _routers(model, read) as routings, ExitStack() as stack, notebook_progress() as progress:
        trained, inferred = (_region(stack, model, device.type, given) for given in (policy, engine))
        for index, record in enumerate(read):
            if progress is not None:
                progress("sequences", index, len(read))
            if len(record.tokens) < 2:
                continue  # of the first token nothing can be recorded
            run = _Run(model, call, index, record, device)
            with trained():
                log_probs, best = run.log_probs()
            sums.add(index, record, log_probs, best)
            sums.add_experts(index, record, routings)
            if engine is not None:
                with inferred():
                    sums.add_precision(run.log_probs()[0] - log_probs)
    found = sums.drift()
    if engine is None:
        return found
    batches = [_batch(read[index], device) for index in list(found.sequences)[:worst]]
    objective: dict[str, Any] = (
        {"loss": _loss} if forward is None else {"forward": lambda *given: _loss_by(call, *given)}
    )
    drift = compare(
        model,
        batches,
        {"engine": engine},
        reference="float32" if policy is None else policy,
        gradients=False,
        clip_band=clip_band,
        **objective,
    )
    return replace(found, precision=sums.precision(), drift=drift)


class _Run(NamedTuple):
    """The run of a model on one record."""

    model: nn.Module
    forward: Callable[[nn.Module, torch.Tensor], Any]
    number: int
    record: TokenRecord
    device: torch.device

    @torch.inference_mode()
    def log_probs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of the recorded tokens in fp64, and the likeliest token for each position."""
        (inputs, targets) = _batch(self.record, self.device)
        try:
            outputs = self.forward(self.model, inputs)
        except IndexError as error:
            lowest, highest, length = min(self.record.tokens), max(self.record.tokens), inputs.shape[1]
            raise ValueError(
                f"records[{self.number}]: the model cannot look up {length} tokens from {lowest} to {highest}: one is "
                "out of its vocabulary, or they are too many"
            ) from error
        log_probs, logits = token_log_probs(outputs, targets), logits_of(outputs)
        if log_probs is None or logits is None:
            classes = "" if logits is None else f", got logits of shape {tuple(logits.shape)}"
            raise ValueError(
                f"records[{self.number}]: the model must return logits of shape (1, {inputs.shape[1]}, classes) that "
                f"have each token as a class (the largest is {max(self.record.tokens)}){classes}"
            )
        largest = max((token for at in self.record.top for token in at), default=0)
        if largest >= logits.shape[-1]:
            raise ValueError(
                f"records[{self.number}]: top has the token {largest}, which is none of the model's "
                f"{logits.shape[-1]} classes"
            )
        return log_probs.cpu(), logits[0].argmax(-1).cpu()


class _Sums:
    """Accumulates figures over sequences."""

    def __init__(self, band: tuple[float, float]) -> None:
        self._band = band
        self._all = LogProbSums(band)
        self._sequences: dict[int, LogProbDrift] = {}
        self._positions: defaultdict[tuple[int, int], LogProbSums] = defaultdict(lambda: LogProbSums(band))
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # ids, and both log-probabilities
        self._best: Counter[bool] = Counter()
        self._experts: defaultdict[str, Counter[bool]] = defaultdict(Counter)
        self._squares = self._squares_of_precision = 0.0

    def add(self, index: int, record: TokenRecord, log_probs: torch.Tensor, best: torch.Tensor) -> None:
        """Add a sequence.

        Args:
            index: Its index.
            record: Its record.
            log_probs: The model's log-probabilities of the recorded tokens.
            best: The model's likeliest token after each token but the last.
        """
        places = [place for place, value in enumerate(record.log_probs) if value is not None]
        if not places:
            return
        recorded = torch.tensor([record.log_probs[place] for place in places], dtype=torch.float64)
        own = LogProbSums(self._band)
        for sums in (own, self._all):
            sums.add(recorded, log_probs)
        drift = own.drift()
        assert drift is not None
        self._sequences[index] = drift
        offsets = torch.tensor([place - places[0] for place in places])
        for first, last in _groups(int(offsets[-1])):
            inside = (offsets >= first) & (offsets <= last)
            self._positions[first, last].add(recorded[inside], log_probs[inside])
        differences = log_probs - recorded
        self._squares += float(differences.square().sum())
        self._parts.append((torch.tensor([record.tokens[place] for place in places]), recorded, log_probs))
        for place in places:
            if record.top and record.top[place]:
                likeliest = max(record.top[place], key=record.top[place].__getitem__)
                self._best[likeliest != int(best[place - 1])] += 1

    def add_experts(self, index: int, record: TokenRecord, routings: Mapping[str, _Routing]) -> None:
        """Add the experts of a sequence, with what each router returned for it."""
        for name, experts in record.experts.items():
            rows, among = routings[name]
            largest = max((expert for at in experts for expert in at), default=0)
            if among is not None and largest >= among:
                raise ValueError(
                    f"records[{index}]: experts has the expert {largest} of {name!r}, which scores {among} experts"
                )
            for row, recorded in zip(rows, experts, strict=False):  # the last token is no input
                if recorded:
                    own = row.topk(len(recorded)).indices if row.is_floating_point() else row
                    self._experts[name][set(own.tolist()) != set(recorded)] += 1

    def add_precision(self, differences: torch.Tensor) -> None:
        """Add what the engine's precision changes in the log-probabilities of a sequence."""
        self._squares_of_precision += float(differences.square().sum())

    def _by_token(self) -> Iterator[tuple[int, LogProbDrift]]:
        """Yield the figures of each token."""
        ids, recorded, log_probs = map(torch.cat, zip(*self._parts, strict=True))
        order, counts = ids.argsort(), ids.bincount()
        tokens = counts.nonzero().flatten()
        groups = (torch.split(values[order], counts[tokens].tolist()) for values in (recorded, log_probs))
        for token, *both in zip(tokens.tolist(), *groups, strict=True):
            sums = LogProbSums(self._band)
            sums.add(*both)
            if (drift := sums.drift()) is not None:
                yield token, drift

    def precision(self) -> PrecisionShare:
        """Return how much precision explains."""
        tokens = sum(drift.tokens for drift in self._sequences.values())
        return PrecisionShare(math.sqrt(self._squares / tokens), math.sqrt(self._squares_of_precision / tokens))

    def drift(self) -> RecordedDrift:
        """Return the figures."""
        summary = self._all.drift()
        assert summary is not None
        positions = {group: drift for group, sums in sorted(self._positions.items()) if (drift := sums.drift())}
        return RecordedDrift(
            summary=summary,
            sequences=dict(sorted(self._sequences.items(), key=lambda item: -item[1].mean_difference)),
            positions=positions,
            tokens=dict(sorted(self._by_token(), key=lambda item: -item[1].mean_difference * item[1].tokens)),
            best_differs=_share(self._best) if self._best else None,
            experts={name: _share(counts) for name, counts in self._experts.items()},
        )


def _share(counts: Counter[bool]) -> float:
    return counts[True] / counts.total()


def _groups(last: int) -> Iterator[tuple[int, int]]:
    """Yield groups of positions up to the last one, each twice as long as the one before."""
    first, size = 0, _FIRST_POSITIONS
    while first <= last:
        yield first, first + size - 1
        first, size = first + size, 2 * size


def _batch(record: TokenRecord, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of a sequence, and its targets, which are ignored where nothing was recorded."""
    pairs = zip(record.tokens, record.log_probs, strict=True)
    targets = [_IGNORED if value is None else token for token, value in pairs]
    tokens = torch.tensor([[*record.tokens[:-1]], targets[1:]], device=device)
    return tokens[:1], tokens[1:]


def _called(model: nn.Module, tokens: torch.Tensor) -> Any:
    return model(tokens)


def _loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = logits_of(outputs)
    assert logits is not None
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _loss_by(call: Callable[[nn.Module, torch.Tensor], Any], model: nn.Module, batch: Any) -> torch.Tensor:
    return _loss(call(model, batch[0]), batch[1])


def _region(
    stack: ExitStack, model: nn.Module, device: str, policy: Policy | BoundPolicy | None
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that returns a policy's region for the model."""
    if policy is None:
        return nullcontext
    bound = policy if isinstance(policy, BoundPolicy) else stack.enter_context(temporarily_bound(policy, model))
    bound.check_is_bound()
    return Precision(device, bound).region


class _Routing(NamedTuple):
    """What a router returned for one sequence."""

    rows: torch.Tensor  # ids of the experts that it chose, (tokens, experts per token), or scores, (tokens, experts)
    experts: int | None  # the number of experts it chooses from, if that is known


@contextmanager
def _routers(model: nn.Module, records: Sequence[TokenRecord]) -> Iterator[dict[str, _Routing]]:
    """Keep what the routers that records name return, from each forward in the block."""
    modules, found = dict(model.named_modules()), dict[str, _Routing]()

    def keep(name: str, outputs: Any) -> None:
        found[name] = routing = _routing(name, outputs)
        if routing.rows.is_floating_point() and (bias := _correction_bias(modules, name)):
            raise ValueError(
                f"the router {name!r} returns scores alone, to which the model adds {bias} before it chooses experts: "
                "leave the experts of this router out of the records"
            )

    with ExitStack() as stack:
        for name in {name for record in records for name in record.experts}:
            if name not in modules:
                raise ValueError(f"records name a router {name!r}, which is no module of the model")
            hook = modules[name].register_forward_hook(lambda module, args, outputs, name=name: keep(name, outputs))
            stack.callback(hook.remove)
        yield found


def _routing(name: str, outputs: Any) -> _Routing:
    """Return the experts among the outputs of a router, or else its scores, which are the first output."""
    returned: list[Any] = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    first = returned[0] if returned else None
    scores = first if isinstance(first, torch.Tensor) and first.is_floating_point() else None
    known, size = (None, 0) if scores is None else (scores.shape[:-1].numel(), scores.shape[-1])
    for ids in filter(_has_choices, returned):
        if known is None or known == ids.shape[:-1].numel():  # beside as many experts, scores are their weights
            return _Routing(ids.detach().flatten(0, -2).cpu(), size if size > ids.shape[-1] else None)
    if scores is None:
        raise ValueError(
            f"the router {name!r} must return scores of shape (..., experts), or the ids of the experts that it "
            f"chooses, got {type(first).__name__}"
        )
    return _Routing(scores.detach().flatten(0, -2).cpu(), size)


def _has_choices(value: Any) -> bool:
    """Return True for ids of experts, of which a token has each once; False also for masks of ones and zeros."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.dtype not in (torch.int32, torch.int64):
        return False
    return bool(value.sort(-1).values.diff(dim=-1).ne(0).all())


def _correction_bias(modules: Mapping[str, nn.Module], name: str) -> str:
    """Return the name of a bias of a router, or of its parent, that changes which experts are chosen; "" for none."""
    for owner in (name, name.rpartition(".")[0]):
        for key, _ in chain(modules[owner].named_parameters(), modules[owner].named_buffers()):
            if key.count(".") <= 1 and key.endswith(("correction_bias", "expert_bias")):
                return f"{owner}.{key}".lstrip(".")
    return ""
