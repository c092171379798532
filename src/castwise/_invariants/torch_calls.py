"""`TORCH_CALLS`: the settings that a script gives torch and that torch does not tell, while castwise is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from castwise._guard import ErrorBoundary
from castwise._layered_functions import LayeredFunction
from castwise.amp._observers import OBSERVERS


class TorchCalls:
    """Layers around `DistributedDataParallel.register_comm_hook` and `DataLoader.__iter__` while followed."""

    def __init__(self) -> None:
        self._guard = ErrorBoundary("castwise does not know how batches are drawn and gradients are summed")
        self._followers = 0
        self._checkpoints: tuple[tuple[LayeredFunction, Callable[..., Any]], ...] = ()
        self._hooks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._latest: tuple[ref[Any], ref[Any]] | None = None
        self._epochs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._layers: tuple[tuple[LayeredFunction, Callable[..., Any]], ...] = (
            (LayeredFunction("register_comm_hook", DistributedDataParallel), self._register),
            (LayeredFunction("__iter__", DataLoader), self._iter),
        )

    def follow(self) -> None:
        """Start to follow the calls."""
        self._followers += 1
        if self._followers == 1:
            for function, layer in self._layers:
                function.add(layer)

    def follow_checkpoints(self) -> None:
        """Also follow functions of `torch.distributed.checkpoint` that save and load, if the script has imported it."""
        name = "torch.distributed.checkpoint"
        package, saver, loader = (
            sys.modules.get(name + part) for part in ("", ".state_dict_saver", ".state_dict_loader")
        )
        if self._checkpoints or package is None or saver is None or loader is None:
            return
        self._checkpoints = (
            (LayeredFunction("save", package, saver), self._save),
            (LayeredFunction("async_save", package, saver), self._async_save),
            (LayeredFunction("load", package, loader), self._load),
        )
        for function, layer in self._checkpoints:
            function.add(layer)

    def leave(self) -> None:
        """Undo one `follow`."""
        self._followers -= 1
        if not self._followers:
            for function, layer in (*self._checkpoints, *self._layers):
                function.remove(layer)
            self._checkpoints = ()
            self._hooks.clear()
            self._epochs.clear()
            self._latest = None

    def communication_hook(self, wrapper: DistributedDataParallel) -> Any:
        """Return the hook that sums the gradients of a wrapper; None if there is none, or it is not known."""
        return self._hooks.get(wrapper)

    def repeated_epoch(self) -> int | None:
        """Return the epoch of a sampler that begins to draw the order of that epoch a second time; called at each step.

        Of a sampler that shuffles for several ranks, from which steps were taken in both passes.
        """
        loader, iterator = (None, None) if self._latest is None else (reference() for reference in self._latest)
        self._latest = None
        if loader is None or iterator is None:  # a validation that has ended
            return None
        epoch = int(loader.sampler.epoch)
        is_repeated = self._epochs.get(loader) == epoch
        self._epochs[loader] = epoch
        return epoch if is_repeated else None

    def _register(self, register: Any, wrapper: Any, state: object, hook: Any, *args: Any, **kwargs: Any) -> Any:
        result = register(wrapper, state, hook, *args, **kwargs)
        self._guard.call(self._hooks.__setitem__, wrapper, hook)
        return result

    def _async_save(self, save: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        for observer in tuple(OBSERVERS):
            self._guard.call(observer.file_saved, state_dict)
        return save(state_dict, *args, **kwargs)

    def _save(self, save: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._async_save(save, state_dict, *args, **kwargs)
        for observer in tuple(OBSERVERS):
            self._guard.call(observer.file_written, state_dict, _file_of(**kwargs))
        return result

    def _load(self, load: Any, *args: Any, **kwargs: Any) -> Any:
        for observer in tuple(OBSERVERS):
            self._guard.call(observer.file_read, _file_of(**kwargs))
        return load(*args, **kwargs)

    def _iter(self, begin: Any, loader: DataLoader[Any]) -> Any:
        iterator = begin(loader)
        self._guard.call(self._begun, loader, iterator)
        return iterator

    def _begun(self, loader: DataLoader[Any], iterator: Any) -> None:
        sampler = loader.sampler
        draws = isinstance(sampler, DistributedSampler) and sampler.shuffle and sampler.num_replicas > 1
        if draws and torch.is_grad_enabled():
            self._latest = ref(loader), ref(iterator)


def _file_of(checkpoint_id: Any = None, **_: Any) -> Any:
    """Return the file by which a folder with a checkpoint is known; None if it is not given as a path."""
    return os.path.join(checkpoint_id, ".metadata") if isinstance(checkpoint_id, (str, os.PathLike)) else None


TORCH_CALLS = TorchCalls()
"""The calls in this process."""
