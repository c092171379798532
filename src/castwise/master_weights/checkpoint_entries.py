"""The entries for 16-bit weights in an optimizer checkpoint: write, check and load them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from castwise._suggestions import listed
from castwise.master_weights.buckets import Weight, as_dtensor, is_dtensor, laid_out_as, local
from castwise.master_weights.codecs import Chance
from castwise.master_weights.lending import LowState

PREFIX = "master_weights."
_DIGEST, _SEED, _STEPS = (PREFIX + name for name in ("digest", "seed", "steps"))
_NO_DIGEST = -1


def entries_of(weight: Weight, chance: Chance | None) -> dict[str, torch.Tensor]:
    """Return the checkpoint entries of a weight, in its shape, including the state of `chance` if given."""
    here = local(weight.param)
    entries = {}
    for name, dtype in weight.stretches[0].bucket.codec.entries().items():
        entry = torch.empty_like(here, dtype=dtype)
        for stretch in weight.stretches:
            stretch.of(entry).copy_(stretch.saved()[name])
        entries[PREFIX + name] = as_dtensor(entry, weight.param)
    if entries:  # no digest for a DTensor: the part on this rank may differ when loaded
        entries[_DIGEST] = torch.tensor(_NO_DIGEST if is_dtensor(weight.param) else weight.digest())
    if chance is not None:
        entries[_SEED], entries[_STEPS] = torch.tensor(chance.seed), torch.tensor(chance.steps())
    return entries


def separated(state: Mapping[Any, Any]) -> tuple[dict[Any, dict[str, Any]], dict[Any, Any]]:
    """Split the state of a checkpoint into our entries, by parameter number, and the inner optimizer's state."""
    ours, of_inner = {}, {}
    for number, entries in state.items():
        if not isinstance(entries, Mapping):
            of_inner[number] = entries
            continue
        mine = {name: value for name, value in entries.items() if str(name).startswith(PREFIX)}
        rest = {name: value for name, value in entries.items() if name not in mine}
        if mine:
            ours[number] = mine
        if rest:
            of_inner[number] = rest
    return ours, of_inner


def check_entries(weight: Weight, entries: Mapping[str, torch.Tensor], settings: str) -> None:
    """Raise a ValueError if checkpoint entries do not fit a weight.

    Args:
        weight: The weight.
        entries: Its entries in the checkpoint.
        settings: The method and its settings, for the error message.
    """
    expected = {PREFIX + name: dtype for name, dtype in weight.stretches[0].bucket.codec.entries().items()}
    given_names = entries.keys() - {_DIGEST, _SEED, _STEPS}
    if given_names != expected.keys():
        raise ValueError(
            f"the checkpoint has {listed(sorted(given_names)) or 'no entries'} for {weight.name!r}, but {settings} "
            f"needs {listed(sorted(expected)) or 'none'}: use the settings it was saved with"
        )
    for name, dtype in expected.items():
        if entries[name].dtype is not dtype:
            raise ValueError(
                f"{name!r} of {weight.name!r} is {entries[name].dtype} in the checkpoint, not {dtype}: another "
                "optimizer loaded and cast it. To keep the rest of its state, remove the entries that begin with "
                f"{PREFIX!r}"
            )
        if entries[name].shape != weight.layout.shape:
            raise ValueError(
                f"{name!r} of {weight.name!r} has shape {tuple(entries[name].shape)} in the checkpoint, but the "
                f"parameter has {tuple(weight.layout.shape)}"
            )


def load_entries(weight: Weight, entries: Mapping[str, torch.Tensor], chance: Chance | None) -> None:
    """Load checked entries. The weights that they belong to may be loaded before or after."""
    whole = {
        name: laid_out_as(local(entries[PREFIX + name]), local(weight.param))
        for name in weight.stretches[0].bucket.codec.entries()
    }
    for stretch in weight.stretches:
        stretch.load({name: stretch.of(entry) for name, entry in whole.items()})
    digest = int(entries.get(_DIGEST, _NO_DIGEST))
    if digest == _NO_DIGEST or is_dtensor(weight.param):
        weight.bits, weight.awaits_weights = None, True
    else:
        weight.bits, weight.version, weight.awaits_weights = digest, None, False
    if chance is not None and _SEED in entries:
        chance.set(int(entries[_SEED]), int(entries[_STEPS]))


def load_inner(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], low: set[torch.Tensor], low_state: LowState
) -> None:
    """Load the inner optimizer's part of a checkpoint.

    Optimizers cast loaded state to the dtype of their parameters, so fp32 tensors stand in for 16-bit parameters.

    Args:
        optimizer: The inner optimizer. Its groups stay the same objects.
        state_dict: The checkpoint without our entries.
        low: The 16-bit parameters.
        low_state: How their state is stored.
    """
    groups, state_before = optimizer.param_groups, optimizer.state
    stand_ins = {
        param: torch.zeros((), device=local(param).device).expand(param.shape) if param in low else param
        for group in groups
        for param in group["params"]
    }
    params_before = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [stand_ins[param] for param in group["params"]]
        optimizer.load_state_dict(state_dict)
        loaded_groups, loaded_state = optimizer.param_groups, optimizer.state
    except BaseException:
        optimizer.state = state_before
        raise
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, params_before, strict=True):
            group["params"] = params
    state: defaultdict[Any, Any] = defaultdict(dict)
    param_of = {id(stand_in): param for param, stand_in in stand_ins.items()}
    for key, value in loaded_state.items():
        param = param_of.get(id(key), key)
        state[param] = low_state.stored(value, param) if param in low else value
    optimizer.state = state
    for group, loaded in zip(groups, loaded_groups, strict=True):
        if group is not loaded:
            params = group["params"]
            group.clear()
            group.update({**loaded, "params": params})
