"""The index of keywords has every public name of castwise and of torch.amp, each with a place in the reference."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import identifiers
import pytest
import torch

import castwise

TORCHS_CLASSES = ("GradScaler", "ShardedGradScaler", "autocast")
TORCHS_FUNCTIONS = ("custom_fwd", "custom_bwd", "is_autocast_available", "autocast_decorator", "OptState")


@pytest.fixture(scope="module")
def keywords() -> dict[str, str]:
    return identifiers.keywords()


def test_the_face_is_complete(keywords: dict[str, str]) -> None:
    names = [name for name in castwise.__all__ if not inspect.ismodule(getattr(castwise, name))]
    assert {f"castwise.{name}" for name in names} <= set(keywords)


def test_every_module_that_offers_names_is_covered() -> None:
    found = set()
    for module in pkgutil.walk_packages(castwise.__path__, "castwise."):
        if any(part.startswith("_") for part in module.name.split(".")):
            continue
        imported = importlib.import_module(module.name)
        if hasattr(imported, "__all__") and identifiers.public_names(imported):
            found.add(module.name)
    of_another_name = {"castwise.integrations.pytorch_lightning"}  # the same names as castwise.integrations.lightning
    assert found - of_another_name <= set(identifiers.OURS)


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
        ("torch.amp.autocast_mode.custom_fwd", "castwise.custom_fwd"),
        ("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler", "castwise.ShardedGradScaler"),
        ("castwise.amp.GradScaler.clip_grad_norm_", "castwise.GradScaler.clip_grad_norm_"),
        ("castwise.Policy.bind", "castwise.Policy.bind"),
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
