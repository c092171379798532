"""The state of random number generators: of torch on all devices, of Python, and of numpy where it is used."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """The state there is when it is made. Generators that a program has made for itself are not in it."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        accelerator = _accelerator()
        self._of_devices = None if accelerator is None else accelerator.get_rng_state_all()
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._torch)
        accelerator = _accelerator()
        if accelerator is not None and self._of_devices is not None:
            accelerator.set_rng_state_all(self._of_devices)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _accelerator() -> Any:
    """Return the module of torch for the accelerator that is in use, if it has generators: `torch.cuda`, ..."""
    found = torch.accelerator.current_accelerator()
    module = None if found is None else torch.get_device_module(found)
    in_use = module is not None and getattr(module, "is_initialized", lambda: True)()
    return module if in_use and hasattr(module, "get_rng_state_all") else None
