"""The index of keywords has every public name of castwise and of torch.amp, each with a place in the reference."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterator

import identifiers
import pytest
import torch

import castwise
from castwise.monitor import _records
from castwise.monitor._records import JsonObject

TORCHS_CLASSES = ("GradScaler", "ShardedGradScaler", "autocast")
TORCHS_FUNCTIONS = ("custom_fwd", "custom_bwd", "is_autocast_available", "autocast_decorator", "OptState")


@pytest.fixture(scope="module")
def keywords() -> dict[str, str]:
    return identifiers.keywords()


def test_the_face_is_complete(keywords: dict[str, str]) -> None:
    assert {f"castwise.{name}" for name in castwise.__all__} <= set(keywords)


def test_every_module_that_offers_names_is_covered() -> None:
    found = set()
    for module in pkgutil.walk_packages(castwise.__path__, "castwise."):
        if any(part.startswith("_") for part in module.name.split(".")):
            continue
        imported = importlib.import_module(module.name)
        if hasattr(imported, "__all__") and identifiers.public_names(imported):
            found.add(module.name)
    assert found <= set(identifiers.OURS)


@pytest.mark.parametrize("module", identifiers.TORCHS)
def test_torchs_names_are_complete(module: str, keywords: dict[str, str]) -> None:
    theirs = importlib.import_module(module)
    known = [*getattr(theirs, "__all__", ()), *TORCHS_CLASSES, *TORCHS_FUNCTIONS]
    for name in known:
        found = getattr(theirs, name, None)
        if found is None or inspect.ismodule(found):
            continue
        assert f"{module}.{name}" in keywords
        for method in dir(found) if name in TORCHS_CLASSES else ():
            if not method.startswith("_") and callable(getattr(found, method)):
                assert f"{module}.{name}.{method}" in keywords


@pytest.mark.parametrize(
    ("keyword", "place"),
    [
        ("torch.amp.GradScaler.unscale_", "castwise.GradScaler.unscale_"),
        ("torch.cuda.amp.GradScaler", "castwise.cuda.amp.GradScaler"),
        ("torch.cuda.amp.GradScaler.update", "castwise.GradScaler.update"),
        ("torch.autocast", "castwise.autocast"),
        ("torch.cuda.amp", "castwise.cuda.amp"),
        ("torch.amp.autocast_mode.custom_fwd", "castwise.custom_fwd"),
        ("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler", "castwise.ShardedGradScaler"),
        ("castwise.amp.GradScaler.clip_grad_norm_", "castwise.GradScaler.clip_grad_norm_"),
        ("castwise.Policy.bind", "castwise.Policy.bind"),
        ("castwise.Policy.compute", "castwise.Policy"),
        ("torch.amp.grad_scaler.OptState.READY", "castwise.amp.grad_scaler.OptState"),
        ("castwise.Cause.OVERFLOW", "castwise.Cause"),
        ("castwise.amp.StepFacts.cause", "castwise.amp.StepFacts"),
        ("castwise.schedules.Simulation.scales", "castwise.schedules.Simulation"),
        ("castwise.monitor.E4M3", "castwise.monitor.E4M3"),
        ("castwise.monitor.Run", "castwise.monitor.Run"),
    ],
)
def test_some_keywords(keyword: str, place: str, keywords: dict[str, str]) -> None:
    assert keywords[keyword] == place


def test_a_name_without_a_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {key: name for key, name in identifiers.places().items() if name != "castwise.Policy"}
    monkeypatch.setattr(identifiers, "places", lambda: places)
    with pytest.raises(LookupError, match=r"no page for .*Policy"):
        identifiers.keywords()


def test_methods_are_documented() -> None:
    for name in set(identifiers.places().values()):
        module, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(module), last)
        for member in identifiers.members(found):
            assert inspect.getdoc(getattr(found, member)), f"{name}.{member}"


def test_torch_is_the_reference() -> None:
    assert set(identifiers.members(torch.amp.GradScaler)) >= {"scale", "unscale_", "step", "update", "state_dict"}


def documented_arguments(found: object) -> set[str]:
    """The arguments that a docstring has an entry or a word for; of a dataclass also the fields with a text below."""
    doc = inspect.getdoc(found) or ""
    entries = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{doc}\n", re.M)
    names = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", entries[1], re.M) if entries else []
    has_fields = inspect.isclass(found) and "__annotations__" in vars(found)
    fields = re.findall(r'^    (\w+):.*\n    """', inspect.getsource(found), re.M) if has_fields else []
    return (
        {name.strip(" *") for each in names for name in each.split(",")}
        | set(fields)
        | set(re.findall(r"`(\w+)`", doc))
    )


# Enums are made by Python, a warning by us alone; these methods are called by a framework, or
# the base class says all.
WITHOUT_ARGUMENTS = {
    *("Cause", "OptState", "MixedPrecisionMistake"),
    *("on_train_begin", "on_step_begin", "on_train_end", "advance_", "adopt", "lowest_after", "RecordSink"),
}
# The page on formats describes the fields of these, and a test compares it with real records.
DESCRIBED_AS_JSON = tuple(
    f"castwise.monitor.{name}"
    for name, cls in vars(_records).items()
    if inspect.isclass(cls) and issubclass(cls, JsonObject)
)


def public_callables() -> Iterator[tuple[str, Callable[..., object]]]:
    where = identifiers.places()
    for name in sorted(set(where.values())):
        module, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(module), last)
        own = [each for each in identifiers.members(found) if identifiers.owner(each, found, where) is found]
        for path, each in [(name, found), *((f"{name}.{member}", getattr(found, member)) for member in own)]:
            is_class = inspect.isclass(each) and not isinstance(each, types.GenericAlias)  # which is one before 3.11
            is_called = is_class or inspect.isroutine(each)
            if path.startswith(DESCRIBED_AS_JSON):
                continue
            if is_called and path.rpartition(".")[2] not in WITHOUT_ARGUMENTS:
                yield path, each


def test_every_argument_of_what_is_public_is_documented() -> None:
    for name, found in public_callables():
        given = inspect.signature(found).parameters
        asked = {each for each in given if each not in {"self", "cls"} and not each.startswith("_")}
        assert asked <= documented_arguments(found), name


def test_an_argument_that_is_not_documented_is_found() -> None:
    def function(known: int, unknown: int) -> None:
        """Do something.

        Args:
            known: A number.
        """

    assert documented_arguments(function) == {"known"}
