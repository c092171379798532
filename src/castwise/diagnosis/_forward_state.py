"""The implicit state of a forward, saved to restore it for a replay: random states and autocast regions."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise.amp._devices import has_autocast
from castwise.amp._thread_state import THREAD
from castwise.amp.autocast_mode import autocast
from castwise.policy._bound_policy import BoundPolicy
from castwise.policy._casting import in_native_state, native_state_of
from castwise.policy._policy import Policy


class RandomState:
    """A snapshot of the global random states of torch on all devices, of Python, and of numpy if it is imported.

    Generators that the program created are not included.

    Args:
        outside_torch: Include the states of Python and numpy, which takes 50 us.
    """

    def __init__(self, *, outside_torch: bool = True) -> None:
        self._torch = torch.get_rng_state()
        accelerator = _accelerator()
        self._of_devices = None if accelerator is None else accelerator.get_rng_state_all()
        self._python = random.getstate() if outside_torch else None
        numpy: Any = sys.modules.get("numpy") if outside_torch else None
        self._numpy = None if numpy is None else numpy.random.get_state()

    def is_current(self, also_outside_torch: bool = False) -> bool:
        """Return True if torch's generators have drawn nothing since the snapshot.

        Args:
            also_outside_torch: Check those of Python and numpy too, which is slower.
        """
        if also_outside_torch and not self.is_current_outside_torch():
            return False
        accelerator = _accelerator()
        if not torch.equal(self._torch, torch.get_rng_state()):
            return False
        if accelerator is None or self._of_devices is None:
            return True
        now = accelerator.get_rng_state_all()
        return all(torch.equal(before, after) for before, after in zip(self._of_devices, now, strict=True))

    def is_current_outside_torch(self) -> bool:
        """Return True if the generators of Python and numpy, as far as the snapshot has them, have drawn nothing."""
        if self._python is not None and random.getstate() != self._python:
            return False
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or self._numpy is None:
            return True
        return all(map(numpy.array_equal, self._numpy, numpy.random.get_state()))

    def to_numbers(self) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """Return torch's states as tensors by name, and those of Python and numpy as JSON, for a file."""
        tensors = {"torch": self._torch}
        tensors |= {f"device.{index}": state for index, state in enumerate(self._of_devices or ())}
        numpy = None if self._numpy is None else [self._numpy[0], self._numpy[1].tolist(), *self._numpy[2:]]
        return tensors, [self._python, numpy]

    @classmethod
    def from_numbers(cls, tensors: Mapping[str, torch.Tensor], outside_torch: Sequence[Any]) -> RandomState:
        """Return what `to_numbers` has been given. States of devices are left out if there are other devices here.

        Raises:
            ValueError: They are not states.
        """
        state = cls.__new__(cls)
        of_devices = [
            tensors[name] for name in sorted(tensors, key=lambda name: (len(name), name)) if name.startswith("device.")
        ]
        accelerator = _accelerator()
        are_ours = accelerator is not None and len(accelerator.get_rng_state_all()) == len(of_devices)
        state._of_devices = of_devices if are_ours else None
        try:
            state._torch = tensors["torch"]
            python, numpy = outside_torch
            state._python = None if python is None else (python[0], tuple(python[1]), python[2])
            state._numpy = numpy if "numpy" in sys.modules else None
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError("it holds no random states") from None
        return state

    def restore(self) -> None:
        """Restore the snapshot."""
        torch.set_rng_state(self._torch)
        accelerator = _accelerator()
        if accelerator is not None and self._of_devices is not None:
            accelerator.set_rng_state_all(self._of_devices)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class _ActivePolicy(NamedTuple):
    """What of `castwise.policy._policy_state.State` a replay needs."""

    bound: BoundPolicy
    device: str
    cache: bool


class CastingState:
    """A snapshot of the autocast regions, torch's and castwise's, that are active in this thread.

    It does not include a `WeightCache`, which does not change the values of casts.

    Args:
        device_types: Device types whose regions to save.
    """

    def __init__(self, device_types: Iterable[str]) -> None:
        self._native = {kind: native_state_of(kind) for kind in device_types if has_autocast(kind)}
        self._policy: Any = THREAD.state

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON, for a file."""
        native = {
            kind: [enabled, str(dtype).removeprefix("torch."), cache]
            for kind, (enabled, dtype, cache) in self._native.items()
        }
        if self._policy is None:
            return {"native": native, "policy": None}
        bound = self._policy.bound
        return {"native": native, "policy": [self._policy.device, bound.policy._fields(), self._policy.cache]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], model: nn.Module, device_types: Mapping[str, str]) -> CastingState:
        """Return what `to_json` has been given, with its policy bound to a model.

        Args:
            value: The state.
            model: The model.
            device_types: The device types to use instead of others.

        Raises:
            ValueError: It is not such a state, or the policy does not fit the model.
        """
        state = cls(())
        try:
            for kind, (enabled, name, cache) in value["native"].items():
                dtype = getattr(torch, name)
                if not isinstance(dtype, torch.dtype):
                    raise TypeError
                state._native[device_types.get(kind, kind)] = bool(enabled), dtype, bool(cache)
            given = value["policy"]
            device, fields, cache = given or ("", {}, False)
        except (KeyError, AttributeError, TypeError, ValueError):
            raise ValueError("it holds no state of autocast") from None
        policy = None if given is None else Policy(**fields).bind(model)
        state._policy = None if policy is None else _ActivePolicy(policy, device_types.get(device, device), cache)
        return state

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Enter these regions instead of the active ones.

        Raises:
            RuntimeError: The policy is no longer bound.
        """
        policy = self._policy
        with ExitStack() as stack:
            for kind, (enabled, dtype, cache) in self._native.items():
                stack.enter_context(in_native_state(kind, enabled, dtype, cache))
            if policy is not None:
                stack.enter_context(autocast(policy.device, policy=policy.bound, cache_enabled=policy.cache))
                enabled, dtype, cache = self._native[policy.device]
                if (enabled, dtype) != (policy.bound.dtype is not None, torch.get_autocast_dtype(policy.device)):
                    # A region of torch.autocast suspends the policy, or a module's rule does.
                    stack.enter_context(torch.autocast(policy.device, dtype, enabled, cache))
            yield


def _accelerator() -> Any:
    """Return torch's module for the accelerator in use (such as `torch.cuda`) if it has generators, else None."""
    found = torch.accelerator.current_accelerator()
    module = None if found is None else torch.get_device_module(found)
    in_use = module is not None and getattr(module, "is_initialized", lambda: True)()
    return module if in_use and hasattr(module, "get_rng_state_all") else None
