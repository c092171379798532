"""The device "sim" of device.cpp as a module of torch, and counts of what the host asks of it.

Importing this builds the C++ part (half a minute, kept in torch's extension cache) and renames torch's one free backend
of the process, so the tests of this folder run in a process of their own.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from tests.accelerator.availability import why_unavailable
from torch.utils import cpp_extension

_SOURCE = Path(__file__).with_suffix(".cpp")
if reason := why_unavailable():
    raise ImportError(f"the simulated accelerator cannot be built: {reason}")
_ABANDONED = 600.0  # seconds after which the lock of a build is that of one that was killed


def _built() -> Any:
    """Build the C++ part, or return the one that was built from the same source, by any checkout."""
    source = _SOURCE.read_bytes()
    made_of = hashlib.sha256(source + f"{sys.version}{torch.__version__}".encode()).hexdigest()[:12]
    root = os.environ.get("TORCH_EXTENSIONS_DIR", cpp_extension.get_default_build_root())
    folder = Path(root) / f"castwise_sim-{made_of}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (copied := folder / _SOURCE.name).exists():  # ninja builds again if the source's path differs
        part = copied.with_suffix(f".{os.getpid()}")
        part.write_bytes(source)
        part.replace(copied)
    lock = folder / "lock"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > _ABANDONED:  # torch would wait for it forever
            lock.unlink()
    return cpp_extension.load("castwise_sim", [str(copied)], extra_cflags=["-O1", "-g0"], build_directory=str(folder))


_C: Any = _built()


def _index(device: Any = None) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return int(_C.current_device() if index is None else index)


class _Device(contextlib.ContextDecorator):
    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _C.current_device()
        _C.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        _C.set_device(self.before)


def _module() -> types.ModuleType:
    """Return what torch expects as `torch.sim`."""
    module: Any = types.ModuleType("torch.sim")
    module.Stream, module.Event, module.device = torch.Stream, torch.Event, _Device
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: _C.device_count
    module.current_device = _C.current_device
    module.set_device = lambda device: _C.set_device(_index(device))
    module.synchronize = lambda device=None: _C.synchronize(_index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_device_name = lambda device=None: "simulated accelerator"
    return module


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def take_hazards() -> list[str]:
    """Complete what is queued, and return the hazards since the last call.

    These are uses of one tensor by two streams at the same time, and writes to pinned memory before it is copied.
    """
    for index in range(_C.device_count):
        _C.synchronize(index)
    return list(_C.take_hazards())


class Counted:
    """What a block asks of the device.

    Attributes:
        ops: For each op, its launches, and the tensors and bytes that it reads and writes.
        waits: How often the host waited, for each reason.
        lines: How often each line of castwise (or else of the test) waited.
    """

    def __init__(self) -> None:
        self.ops: dict[str, tuple[int, int, int]] = {}
        self.waits: dict[str, int] = {}
        self.lines: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Counted:
        _C.reset()
        _C.on_wait(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        _C.on_wait(None)
        self.ops, self.waits = _C.counts()

    def _note(self, wait: str) -> None:
        frame: Any = sys._getframe(1)
        lines = []
        while frame is not None:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        ours = [line for line in lines if "/castwise/" in line[0]]
        tests = [line for line in lines if "/site-packages/" not in line[0] and line[0] != __file__]
        file, line = (ours or tests or lines)[0]
        self.lines[f"{wait} in {Path(file).name}:{line}"] += 1

    @property
    def launches(self) -> int:
        return sum(launches for launches, _, _ in self.ops.values())

    @property
    def bytes(self) -> int:
        return sum(moved for _, _, moved in self.ops.values())

    @property
    def host_waits(self) -> int:
        return sum(self.waits.values())

    def modelled_ms(self, times: float = 1.0) -> float:
        """Return the milliseconds that this would take on an H200 by a model, for `times` as many bytes.

        The device moves 85% of 4.8 TB/s and needs 3 us for each kernel; the host launches one in 5 us.
        """
        on_device = times * self.bytes / (0.85 * 4.8e12) + 3e-6 * self.launches
        return 1e3 * max(on_device, 5e-6 * self.launches)
