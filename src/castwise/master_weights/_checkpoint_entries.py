"""The entries for 16-bit weights in an optimizer checkpoint: write, check and load them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from castwise._suggestions import listed
from castwise._torch_private import is_fsdp_flattened
from castwise.master_weights._buckets import NO_DIGEST, Part, Weight, as_dtensor, flat, is_dtensor, laid_out_as, local
from castwise.master_weights._codecs import Chance, split_codec
from castwise.master_weights._low_state import LowState

PREFIX = "master_weights."
_DIGESTS, _SEED, _STEPS = (PREFIX + name for name in ("row_digests", "seed", "steps"))
_DIGEST_OF_0_2 = PREFIX + "digest"  # of another kind: ignored
_RESIDUE, _TIES = PREFIX + "residue", PREFIX + "ties"
_MASTER, _COMPENSATION = PREFIX + "master", PREFIX + "compensation"  # fp32 weights, rounding errors: methods of 0.2
_UNSIGNED = 1 << 64  # seeds are unsigned, torch's integers are not


def entries_of(weight: Weight, parts: list[Part], chance: Chance | None) -> dict[str, torch.Tensor]:
    """Return the checkpoint entries of a weight, including the state of `chance` if given."""
    here = local(weight.param)
    entries = {}
    for name, dtype in parts[0].bucket.codec.entries().items():
        entry = torch.empty_like(here, dtype=dtype)
        for part in parts:
            part.segment.view_of(entry).copy_(part.saved()[name])
        entries[PREFIX + name] = as_dtensor(entry, weight.param)
    if entries:
        entries[_DIGESTS] = _digest_of(weight)
    if chance is not None:
        signed = chance.seed - _UNSIGNED * (chance.seed >= _UNSIGNED // 2)
        entries[_SEED], entries[_STEPS] = torch.tensor(signed), torch.tensor(chance.steps())
    return entries


def _digest_of(weight: Weight) -> torch.Tensor:
    """Return digests of the rows of a weight, which stay right when a checkpoint is loaded on other ranks."""
    param: Any = weight.param
    if is_fsdp_flattened(param):  # FSDP1 takes each entry with dimensions for a flattened parameter
        return weight.digest()
    if not is_dtensor(param):
        return weight.row_digests()
    from torch.distributed.tensor import DTensor, Replicate

    digests, placements = weight.row_digests(), param.placements
    if not all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
        # No rank has all of a row.
        digests = torch.full(param.shape[:1], NO_DIGEST, dtype=torch.int32, device=digests.device)
        placements = [Replicate()] * param.device_mesh.ndim
    stride = (1,) * digests.dim()
    return DTensor.from_local(
        digests, param.device_mesh, placements, run_check=False, shape=param.shape[:1], stride=stride
    )


def check_form(state_dict: object) -> None:
    """Raise a ValueError unless a value has the form of an optimizer's `state_dict()`."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError('the state_dict of an optimizer must have "state" and "param_groups"')
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping):
        raise ValueError(f'"state" of the checkpoint must be a dict, got {type(state).__name__}')
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f'"param_groups" of the checkpoint must be a list of dicts, got {type(groups).__name__}')
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f'each group of the checkpoint must be a dict with a list of "params", got {group!r}')
        for number in group["params"]:
            if not isinstance(number, (int, str)):
                raise ValueError(
                    f"the parameters of a group of the checkpoint must be numbers or names, got {number!r}"
                )


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


def as_split(weights: Mapping[Any, Weight], ours: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return our entries of a checkpoint as those of method "split", if castwise 0.2 saved them with a former method.

    Args:
        weights: The 16-bit weights, by parameter number.
        ours: Our entries, by parameter number, each of one of the weights. Returned as they are if they are of another
            method.

    Raises:
        ValueError: An entry is damaged, or its fp32 weight cannot be determined.
    """
    names = {frozenset(_own_names(entries)) for entries in ours.values()}
    is_bfloat16 = all(weight.layout.dtype is torch.bfloat16 for weight in weights.values())
    if names == {frozenset({_RESIDUE})} and is_bfloat16:  # rounding="nearest_away", which rounded no tie down
        return {number: {**entries, _TIES: _no_ties(entries[_RESIDUE])} for number, entries in ours.items()}
    if names in ({frozenset({_MASTER})}, {frozenset({_COMPENSATION})}):
        return {number: _of_fp32_or_kahan(weights[number], entries) for number, entries in ours.items()}
    return ours


def _own_names(entries: Mapping[str, Any]) -> set[str]:
    """Return the names of the entries that the codec has written."""
    return entries.keys() - {_DIGESTS, _DIGEST_OF_0_2, _SEED, _STEPS}


def _no_ties(residue: Any) -> Any:
    return torch.zeros_like(residue, dtype=torch.bool) if _has_values(residue) else residue


def _of_fp32_or_kahan(weight: Weight, entries: dict[str, Any]) -> dict[str, Any]:
    """Return entries of method "fp32" or "kahan" as those of "split"."""
    (name,) = _own_names(entries)
    here = local(weight.param)
    _check_entry(weight, name, entries[name], torch.float32 if name == _MASTER else here.dtype)
    fp32 = flat(laid_out_as(local(entries[name]).to(here.device), here)).float()
    if name == _COMPENSATION:
        fp32 = flat(here).float() + fp32
    # The extra bits belong to the checkpoint's 16-bit weights. For "fp32" these are the rounded fp32 weights. For
    # "kahan" they are the model's, which adding a compensation never changes: if it does, the model is not loaded.
    expected = flat(here) if name == _COMPENSATION else fp32.to(here.dtype)
    low = torch.empty_like(expected)
    codec = split_codec(here.dtype, len(fp32), here.device)
    codec.encode(fp32, low)
    if bool(((low != expected) & ~fp32.isnan()).any()):
        raise ValueError(
            f"{name!r} of {weight.name!r} does not belong to the 16-bit weight: load the model first"
            if name == _COMPENSATION
            else f"{name!r} of {weight.name!r} has a weight beyond 65504, where float16 ends"
        )
    converted = {other: entry for other, entry in entries.items() if other != name}
    for kept, entry in codec.saved(0, len(fp32)).items():
        converted[PREFIX + kept] = as_dtensor(entry.as_strided(here.shape, here.stride()), weight.param)
    return converted


def check_entries(weight: Weight, parts: list[Part], entries: Mapping[str, Any], settings: str) -> None:
    """Raise a ValueError if checkpoint entries do not fit a weight.

    Args:
        weight: The weight.
        parts: Its parts.
        entries: Its entries in the checkpoint.
        settings: The method and its settings, for the error message.
    """
    expected = {PREFIX + name: dtype for name, dtype in parts[0].bucket.codec.entries().items()}
    given_names = _own_names(entries)
    if given_names != expected.keys():
        raise ValueError(
            f"the checkpoint has {listed(sorted(given_names)) or 'no entries'} for {weight.name!r}, but {settings} "
            f"needs {listed(sorted(expected)) or 'none'}: use the settings it was saved with"
        )
    for name, dtype in expected.items():
        _check_entry(weight, name, entries[name], dtype)
    digest = entries.get(_DIGESTS)
    if digest is not None and not (
        _has_values(digest)
        and digest.dtype is torch.int32
        and digest.shape in ((), weight.layout.shape[:1])
        and not (is_dtensor(digest) and digest.dim() and not is_dtensor(weight.param))
    ):
        raise ValueError(
            f"{_DIGESTS!r} of {weight.name!r} must be an int32 tensor of shape {tuple(weight.layout.shape[:1])}, got "
            f"{_described(digest)}: the checkpoint is damaged"
        )


def _check_entry(weight: Weight, name: str, entry: Any, dtype: torch.dtype) -> None:
    if not _has_values(entry):
        raise ValueError(
            f"{name!r} of {weight.name!r} must be a dense {dtype} tensor, got {_described(entry)}: the checkpoint is "
            "damaged"
        )
    if entry.dtype is not dtype:
        raise ValueError(
            f"{name!r} of {weight.name!r} is {entry.dtype} in the checkpoint, not {dtype}: another "
            "optimizer loaded and cast it. To keep the rest of its state, remove the entries that begin with "
            f"{PREFIX!r}"
        )
    if entry.shape != weight.layout.shape:
        raise ValueError(
            f"{name!r} of {weight.name!r} has shape {tuple(entry.shape)} in the checkpoint, but the "
            f"parameter has {tuple(weight.layout.shape)}"
        )
    if _sharding(entry) != _sharding(weight.param):
        raise ValueError(
            f"{name!r} of {weight.name!r} is {_sharding(entry)} in the checkpoint, but the parameter is "
            f"{_sharding(weight.param)}: load it with torch.distributed.checkpoint, which converts it"
        )


def _has_values(entry: object) -> bool:
    return isinstance(entry, torch.Tensor) and entry.layout is torch.strided and not entry.is_meta


def _described(entry: object) -> str:
    if not isinstance(entry, torch.Tensor):
        return repr(entry)
    return f"{entry.dtype} of shape {tuple(entry.shape)}, layout {entry.layout}, on {entry.device}"


def _sharding(tensor: Any) -> str:
    """Return how a tensor is distributed over ranks, for comparisons and messages."""
    if not is_dtensor(tensor):
        return "not sharded"
    return f"placed as {tuple(tensor.placements)} on {tensor.device_mesh}"


def check_kinds(name: str, of_param: object, kept: Mapping[Any, Any], *, may_be_none: Callable[[Any], bool]) -> None:
    """Raise a ValueError if state in a checkpoint cannot be what the inner optimizer keeps under the same name.

    Args:
        name: The parameter's name.
        of_param: Its state in the checkpoint, without our entries.
        kept: State of the inner optimizer. Entries that are not in it, or neither numbers nor tensors, are not checked.
        may_be_none: Returns True for the names of tensors that the optimizer creates later if they are None.
    """
    for entry, value in of_param.items() if isinstance(of_param, Mapping) else ():
        own = kept.get(entry)
        if _is_number(own):
            wanted, fits = "a number", _is_number(value)
        elif isinstance(own, torch.Tensor):
            wanted, fits = "a real tensor", isinstance(value, torch.Tensor) and not value.is_complex()
        else:
            continue
        is_absent = value is None and isinstance(own, torch.Tensor) and own.dim() > 0 and may_be_none(entry)
        if not fits and not is_absent:
            raise ValueError(
                f"{entry!r} of {name!r} must be {wanted}, got {_described(value)}: the checkpoint is of another "
                "optimizer, or damaged"
            )


def _is_number(value: Any) -> bool:
    """Return True for a real number, or a tensor of one."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, (int, float))
    return _has_values(value) and value.numel() == 1 and not value.is_complex()


def check_state(weight: Weight, of_param: object, kept: Mapping[Any, Any], *, by_element: bool) -> None:
    """Raise a ValueError if the inner optimizer's state of a 16-bit weight cannot belong to it.

    Args:
        weight: The weight.
        of_param: Its state in the checkpoint, without our entries.
        kept: State of the inner optimizer; see `check_kinds`.
        by_element: Whether the inner optimizer steps each element independently, so that its state has the shape of
            the weight.
    """
    if not isinstance(of_param, Mapping):
        raise ValueError(f"the state of {weight.name!r} in the checkpoint must be a dict, got {of_param!r}")
    for name, value in of_param.items():
        if not isinstance(value, torch.Tensor):
            continue
        may_be_number = not isinstance(kept.get(name), torch.Tensor) or _is_number(kept[name])
        fits = value.shape == weight.layout.shape or not by_element or (value.numel() == 1 and may_be_number)
        if not fits or not _has_values(value):
            raise ValueError(
                f"{name!r} of {weight.name!r} must be a dense tensor of shape {tuple(weight.layout.shape)}, got "
                f"{_described(value)}: the checkpoint is of another model, or damaged"
            )


def chance_in(ours: Mapping[Any, Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return the seed and the number of steps that a checkpoint has for stochastic rounding; None if it has none.

    Raises:
        ValueError: They are damaged, or differ between weights.
    """
    states = set()
    for entries in ours.values():
        if _SEED not in entries and _STEPS not in entries:
            continue
        seed: Any = entries.get(_SEED)
        steps: Any = entries.get(_STEPS)
        if not _is_integer(seed) or not _is_integer(steps) or int(steps) < 0:
            raise ValueError(
                f"{_SEED!r} and {_STEPS!r} must be integers, and the steps >= 0; the checkpoint has {seed!r} and "
                f"{steps!r}: it is damaged"
            )
        states.add((int(seed) % _UNSIGNED, int(steps)))
    if len(states) > 1:
        raise ValueError(
            f"{_SEED!r} and {_STEPS!r} must be the same for all weights, but the checkpoint has "
            f"{sorted(states)}: it is damaged, or merged from several"
        )
    return next(iter(states), None)


def _is_integer(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, int)
    is_integral = not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool)
    return _has_values(value) and value.dim() == 0 and is_integral


def load_entries(weight: Weight, parts: list[Part], entries: Mapping[str, torch.Tensor]) -> None:
    """Load checked entries. The weights that they belong to may be loaded before or after."""
    here = local(weight.param)
    full = {
        name: laid_out_as(local(entries[PREFIX + name]).to(here.device), here)
        for name in parts[0].bucket.codec.entries()
    }
    for part in parts:
        part.load({name: part.segment.view_of(entry) for name, entry in full.items()})
        part.bucket.digest = None
    digests = _known_digests(weight, entries.get(_DIGESTS))
    if digests is None:  # keep the version: the next write is that of the model's checkpoint, whatever its values
        weight.kept_digests = torch.full((), NO_DIGEST, dtype=torch.int32, device=here.device)
    else:
        weight.kept_digests, weight.version = digests, None


def _known_digests(weight: Weight, entry: torch.Tensor | None) -> torch.Tensor | None:
    """Return the digests of a weight's rows on this rank, or of all of it; None if the checkpoint has none. Syncs."""
    if entry is None:
        return None
    digests = local(entry).to(local(weight.param).device)
    now = weight.row_digests() if entry.dim() else weight.digest()
    if digests.shape != now.shape or bool((digests == NO_DIGEST).all()):
        return None
    return digests.clone()


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
    groups, before = optimizer.param_groups, dict(vars(optimizer))
    contents = [dict(group) for group in groups]
    stand_ins = {
        param: torch.zeros((), device=local(param).device).expand(param.shape) if param in low else param
        for group in groups
        for param in group["params"]
    }
    param_of = {id(stand_in): param for param, stand_in in stand_ins.items()}
    state: defaultdict[Any, Any] = defaultdict(dict)
    try:
        for group in groups:
            group["params"] = [stand_ins[param] for param in group["params"]]
        optimizer.load_state_dict(state_dict)
        loaded_groups = [dict(group) for group in optimizer.param_groups]
        for key, value in optimizer.state.items():
            param = param_of.get(id(key), key)
            state[param] = low_state.stored(value, param) if param in low else value
    except BaseException:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        for group, content in zip(groups, contents, strict=True):
            group.clear()
            group.update(content)
        raise
    optimizer.param_groups, optimizer.state = groups, state
    for group, loaded, content in zip(groups, loaded_groups, contents, strict=True):
        group.clear()
        group.update({**loaded, "params": content["params"]})
