"""`Capsule`: a file with all that a diagnosis replays, to replay it on another machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from castwise._torch_private import buffers_in
from castwise._version import __version__
from castwise.diagnosis import _tensor_file
from castwise.diagnosis._cases import OfLoss, OfOutput
from castwise.diagnosis._diagnosis import Diagnosis, diagnose_loss, diagnose_replay
from castwise.diagnosis._fault_search import Case, named_parameters
from castwise.diagnosis._forward_inputs import KeptInputs
from castwise.diagnosis._forward_state import CastingState, RandomState
from castwise.diagnosis._op_checksums import OpChecksum, checksums_of
from castwise.diagnosis._recording import MicroBatch
from castwise.diagnosis._replay import has_several_ranks
from castwise.diagnosis._tensor_file import Contents
from castwise.policy._module_rules import named_modules

MOST_BYTES = 2**28
MOST = 3
FREE = 0.1
_NAME = "capsule-{}.safetensors"
_FORMAT = "castwise capsule 1"


@dataclass(frozen=True)
class Capsule:
    """A file that `castwise run` writes for a fault: weights, buffers, batch, random states, and autocast regions.

    Reading one runs no code. Without weights, which a capsule leaves out if they are too large, those of the model that
    it is replayed with are used.

    Args:
        path: The file.
        model: Name of the model's class.
        step: Number of the step with the fault.
        text: The diagnosis in the run.
        has_weights: Whether it holds the weights.

    Example:
        >>> from castwise.diagnosis import Capsule
        >>> capsule = Capsule.read("castwise-run/.../Net/capsule-7.safetensors")  # doctest: +SKIP
        >>> print(capsule.diagnose(Net()))  # doctest: +SKIP
    """

    path: str
    model: str
    step: int
    text: str
    has_weights: bool
    _contents: Contents = field(repr=False, compare=False)
    _facts: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a capsule. Takes as much memory as the file is large.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not a capsule; the message names the file.
        """
        try:
            contents = _tensor_file.read(Path(path))
            if contents.texts.get("format") != _FORMAT:
                raise ValueError(f"it is not a {_FORMAT}")
            facts = json.loads(contents.texts["castwise"])
            shown = str(facts["model"]), int(facts["step"]), str(facts["text"]), bool(facts["has_weights"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = error if type(error) is ValueError else "its facts are not those of a capsule"
            raise ValueError(f"{path}: {why}") from None
        return cls(str(path), *shown, contents, facts)

    def diagnose(self, model: nn.Module, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> Diagnosis:
        """Replay the batch, and name the module and op at fault.

        Args:
            model: A model of the same structure. It is given the capsule's weights, buffers and modes. It is not moved.
            loss_fn: Function that maps the model's output to the loss. None starts the backward from the recorded
                gradients of the output.

        Raises:
            ValueError: The model has other parameters or buffers, or the capsule is damaged.
            Exception: Whatever the model or the loss raises.
        """
        case = self._case(model)
        scale = float(self._facts["scale"])
        if loss_fn is None:
            return diagnose_replay(
                model,
                case.args,
                case.kwargs,
                self._gradients(model),
                scale=scale,
                region=case.region,
                loss_is_finite=self._facts["loss_is_finite"],
            )
        return diagnose_loss(OfLoss(case.model, case.args, case.kwargs, loss_fn, case.region), scale)

    def first_difference(self, model: nn.Module) -> str:
        """Return the first op whose result has other bits than in the run, in words; "" if there is none.

        Args:
            model: See `diagnose`.

        Raises:
            ValueError: See `diagnose`, or the capsule has no results of ops.
            Exception: Whatever the model raises.
        """
        wanted = self._checksums()
        with threads(int(self._facts["threads"])):
            found = checksums_of(self._case(model), float(self._facts["scale"]))
        for number, (one, other) in enumerate(zip(wanted, found, strict=False), 1):
            if one.where != other.where:
                return f"op {number:,} of {len(wanted):,} is {other.where}, and was {one.where}"
            if one.total != other.total:
                return f"{one.where} (op {number:,} of {len(wanted):,}) is the first with another result"
        return "" if len(wanted) == len(found) else f"there are {len(found):,} ops, and were {len(wanted):,}"

    @property
    def ops(self) -> int:
        """The number of ops whose results are known; 0 if none was recorded."""
        totals = self._contents.tensors.get("ops.totals")
        return 0 if totals is None else totals.numel()

    @property
    def machine(self) -> str:
        """What the run used, such as "torch 2.13.0 on cpu"."""
        return f"torch {self._facts['torch']} on {', '.join(self._facts['devices'])}"

    def _case(self, model: nn.Module) -> OfOutput:
        """Fill a model, and return the case of its replay."""
        model = next(module for _, module in named_modules(model))
        self._fill(model)
        device = next((param.device for param in model.parameters()), torch.device("cpu"))
        try:
            args, kwargs = (self._read(self._facts[name], device) for name in ("args", "kwargs"))
            devices = {kind: device.type for kind in self._facts["devices"] if kind != "cpu"}
            casting = CastingState.from_json(self._facts["casting"], model, devices)
            states = {name[7:]: state for name, state in self._contents.tensors.items() if name.startswith("random.")}
            random = RandomState.from_numbers(states, self._facts["random"])
            scale, loss_is_finite = float(self._facts["scale"]), self._facts["loss_is_finite"]
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{self.path}: its facts are not those of a capsule: {error!r}") from None
        inputs = KeptInputs(args, kwargs, casting, random, [], [])
        region: Callable[[], AbstractContextManager[Any]] = lambda: inputs.applied(model)  # noqa: E731 - typed
        return OfOutput(model, args, kwargs, self._gradients(model), scale, region, loss_is_finite, True)

    def _gradients(self, model: nn.Module) -> list[torch.Tensor | None]:
        device = next((param.device for param in model.parameters()), torch.device("cpu"))
        return [self._read(gradient, device) for gradient in self._facts["gradients"]]

    @torch.no_grad()
    def _fill(self, model: nn.Module) -> None:
        """Give a model the capsule's weights, buffers and modes."""
        params = {name: param for name, _, param in named_parameters(model)}
        kept = {name[6:]: tensor for name, tensor in self._contents.tensors.items() if name.startswith("param.")}
        wanted = {name: tuple(shape) for name, (shape, _) in self._facts["params"].items()}
        given = {name: tuple(param.shape) for name, param in params.items()}
        if wanted != given:
            names = [name for name in {**wanted, **given} if wanted.get(name) != given.get(name)]
            raise ValueError(
                f"{self.path} is of a model with other parameters: {names[0]} is {wanted.get(names[0], 'missing')} in "
                f"the run and {given.get(names[0], 'missing')} in this model"
            )
        for name, param in params.items():
            param.requires_grad_(bool(self._facts["params"][name][1]))
            if name in kept:
                param.data = kept[name].clone().to(param.device)
        in_training = set(self._facts["training"])
        for name, module in named_modules(model):
            module.training = name in in_training
            for buffer_name in buffers_in(module):
                key = f"buffer.{name}.{buffer_name}"
                if key in self._contents.tensors:
                    buffer = buffers_in(module)[buffer_name]
                    device = torch.device("cpu") if buffer is None else buffer.device
                    buffers_in(module)[buffer_name] = self._contents.tensors[key].clone().to(device)

    def _read(self, value: Any, device: torch.device) -> Any:
        """Return an argument that `_Writer.plain` has written."""
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == "tensor":
            name, requires_grad = inner
            tensor = self._contents.tensors[name].to(device)
            return tensor.requires_grad_() if requires_grad else tensor
        if kind == "dtype":
            return getattr(torch, inner)
        if kind in {"list", "tuple"}:
            return {"list": list, "tuple": tuple}[kind](self._read(item, device) for item in inner)
        if kind == "dict":
            return {key: self._read(item, device) for key, item in inner}
        raise TypeError(kind)

    def _checksums(self) -> list[OpChecksum]:
        try:
            names, numbers = self._facts["ops"], self._contents.tensors["ops.names"].tolist()
            totals = self._contents.tensors["ops.totals"].tolist()
            return [OpChecksum(names[number], total) for number, total in zip(numbers, totals, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"{self.path} holds no results of ops") from None


class _Unwritable(Exception):  # noqa: N818 - not an error, but what a capsule says it leaves out
    """An argument that a capsule cannot hold."""


class _Writer:
    """Collects the tensors of a capsule."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def plain(self, name: str, value: Any) -> Any:
        """Return a value as JSON, and keep its tensors."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) in (torch.Tensor, nn.Parameter) and _tensor_file.can_hold(value):
            self.tensors[name] = value.detach()
            return {"tensor": [name, value.requires_grad]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.plain(f"{name}.{place}", item) for place, item in enumerate(value)]}
        if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
            return {"dict": [[key, self.plain(f"{name}.{key}", item)] for key, item in value.items()]}
        kind = f"tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise _Unwritable(kind)

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass
class Capsules:
    """Writes the capsules of a run: one for each distinct fault, and not more than some.

    Args:
        folder: Where to write.
        run: The folder of the run, whose capsules of all models and ranks are counted.
        most: The largest number of capsules.
    """

    folder: Path
    run: Path
    most: int = MOST
    _known: set[tuple[str, ...]] = field(default_factory=set)

    def write(
        self, step: int, batch: MicroBatch, diagnosis: Diagnosis, scale: float, loss_is_finite: bool | None
    ) -> str:
        """Write a capsule, and return its path; "" if there are enough, or the disk is full.

        Args:
            step: Number of the step.
            batch: The micro-batch at fault.
            diagnosis: What its replay gave.
            scale: Scale of the step's losses.
            loss_is_finite: Whether they were finite; None if it is not known.

        Raises:
            OSError: The file cannot be written.
        """
        fault = diagnosis.phase, diagnosis.module, diagnosis.op, diagnosis.line
        if fault in self._known or len(list(self.run.glob(f"**/{_NAME.format('*')}"))) >= self.most:
            return ""
        self._known.add(fault)
        path = self.folder / _NAME.format(step)
        contents = _contents(step, batch, diagnosis, scale, loss_is_finite)
        if contents is None or path.exists():
            return ""
        disk, size = shutil.disk_usage(self.folder), sum(tensor.nbytes for tensor in contents.tensors.values())
        if disk.free - size < FREE * disk.total:
            return ""
        _tensor_file.write(path, contents)
        return str(path)


def _contents(
    step: int, batch: MicroBatch, diagnosis: Diagnosis, scale: float, loss_is_finite: bool | None
) -> Contents | None:
    """Return what a capsule holds; None if the batch is too large or holds other objects."""
    model = next(module for _, module in named_modules(batch.model))
    writer, inputs = _Writer(), batch.inputs
    gradients = [batch.gradients.get(place) for place in range(batch.outputs)]
    random, outside_torch = inputs.random.to_numbers()
    try:
        facts = {
            "model": type(model).__name__,
            "step": step,
            "text": str(diagnosis),
            "scale": scale,
            "loss_is_finite": loss_is_finite,
            "args": writer.plain("args", inputs.args),
            "kwargs": writer.plain("kwargs", inputs.kwargs),
            "gradients": [writer.plain(f"gradients.{place}", gradient) for place, gradient in enumerate(gradients)],
            "casting": inputs.casting.to_json(),
            "random": outside_torch,
            "params": {name: [list(param.shape), param.requires_grad] for name, _, param in named_parameters(model)},
            "training": [name for name, module in named_modules(model) if module.training],
            "devices": sorted({param.device.type for param in model.parameters()}),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "castwise": __version__,
        }
    except _Unwritable:
        return None
    if writer.nbytes > MOST_BYTES:
        return None
    facts["has_weights"] = _add_weights(writer, model, inputs)
    ops = _checksums(batch, model, gradients, scale, loss_is_finite)
    names = list(dict.fromkeys(op.where for op in ops))
    places = {name: place for place, name in enumerate(names)}
    writer.tensors["ops.names"] = torch.tensor([places[op.where] for op in ops], dtype=torch.int32)
    writer.tensors["ops.totals"] = torch.tensor([op.total for op in ops], dtype=torch.int64)
    writer.tensors |= {f"random.{name}": state for name, state in random.items()}
    return Contents({"format": _FORMAT, "castwise": json.dumps({**facts, "ops": names})}, writer.tensors)


def _add_weights(writer: _Writer, model: nn.Module, inputs: KeptInputs) -> bool:
    """Add the weights and buffers of a model, if they are not too large."""
    before = {(module, name): value for module, name, value in inputs.buffers}
    weights = {f"param.{name}": param.detach() for name, _, param in named_parameters(model)}
    for module_name, module in named_modules(model):
        for name, buffer in buffers_in(module).items():
            if buffer is not None:
                weights[f"buffer.{module_name}.{name}"] = before.get((module, name), buffer)
    fits = writer.nbytes + sum(tensor.nbytes for tensor in weights.values()) <= MOST_BYTES
    if not fits or not all(map(_is_held, weights.values())):
        return False
    writer.tensors |= weights
    return True


def _is_held(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and _tensor_file.can_hold(tensor)


def _checksums(
    batch: MicroBatch,
    model: nn.Module,
    gradients: Sequence[torch.Tensor | None],
    scale: float,
    loss_is_finite: bool | None,
) -> list[OpChecksum]:
    if has_several_ranks():  # the forward may have collectives
        return []
    inputs = batch.inputs
    region: Callable[[], AbstractContextManager[Any]] = lambda: inputs.applied(model)  # noqa: E731 - typed
    case: Case = OfOutput(model, inputs.args, inputs.kwargs, gradients, scale, region, loss_is_finite, True)
    with suppress(Exception):
        return checksums_of(case, scale)
    return []


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with a number of threads, such as a run's: it decides how sums are split."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
