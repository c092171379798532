"""The results of `castwise doctor`."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.cpu import get_capabilities

from castwise._doctor import checkup_text
from castwise._doctor.machine_advice import Recommendation, recommend
from castwise._doctor.native_formats import DTYPES, Native, of_device, to_try
from castwise._doctor.notes import Note, notes_on
from castwise._doctor.speed import Progress, Quartiles, Speed, measure
from castwise._frames import new_frame
from castwise._notebook import notebook_progress
from castwise._recipes.recipe import RECIPES, runs_natively
from castwise._shown import Block, Shown, Table
from castwise._version import __version__
from castwise.amp._emulation import limit_of_onednn, units

if TYPE_CHECKING:
    import pandas

BUDGET_S = 6.0


@dataclass(frozen=True)
class Device:
    """The capabilities of one device.

    Attributes:
        device: The device's name in torch, such as `"cuda:0"`.
        name: The product name.
        threads: For a CPU, the number of threads that torch uses.
        vectors: For a CPU, the instruction set of torch's own kernels.
        units: For a CPU, the instruction sets that multiply in bf16 and in fp16.
        limit: For a CPU, the environment variable that restricts oneDNN, such as `ONEDNN_MAX_CPU_ISA=AVX2`.
        capability: For an NVIDIA GPU, its compute capability.
        memory_bytes: Memory of an NVIDIA or AMD GPU.
        native: By format, whether the hardware computes it; None if unknown.
        recipes: By 8- or 4-bit recipe, whether torch's kernels compute it natively; otherwise it is emulated.
        speeds: By format, the speed of matrix products, or the reason why it was not measured.
        recommendation: The recommended policy and schedule.
    """

    device: str
    name: str
    threads: int | None
    vectors: str | None
    units: dict[str, list[str]] | None
    limit: str | None
    capability: tuple[int, int] | None
    memory_bytes: int | None
    native: Native
    recipes: dict[str, bool]
    speeds: dict[str, Speed | str]
    recommendation: Recommendation

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict with an entry per format."""
        facts = {name: value for name, value in asdict(self).items() if name not in {"native", "speeds"}}
        return {**facts, "formats": [self._format(name) for name in self.native]}

    def _format(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"format": name, "dtype": str(DTYPES[name]), "native": self.native[name]}
        speed = self.speeds.get(name, "not supported by this device")
        if isinstance(speed, str):
            return {**entry, "size": None, "gflops": None, "times_fp32": None, "verdict": None, "error": speed}
        numbers = {"gflops": _rounded(speed.gflops), "times_fp32": _rounded(speed.times_fp32)}
        return {**entry, "size": speed.size, **numbers, "verdict": speed.verdict, "error": None}


@dataclass(frozen=True, repr=False)
class Checkup(Shown):
    """The capabilities of a machine; prints as tables.

    Attributes:
        torch: Version of torch.
        python: Version of Python.
        platform: The operating system.
        devices: The CPU, then any accelerators.
        notes: Known facts about this version of torch.
    """

    torch: str
    python: str
    platform: str
    devices: list[Device]
    notes: list[Note]

    @property
    def versions(self) -> str:
        """The versions and the operating system in one line."""
        return f"castwise {__version__}, torch {self.torch}, Python {self.python}, {self.platform}"

    def __repr__(self) -> str:
        names = [f"{device.device} {device.recommendation.policy or 'fp32'}" for device in self.devices]
        return f"Checkup(recommended: {', '.join(names)})"

    def _blocks(self) -> Iterator[Block]:
        yield self.versions
        for device in self.as_dict()["devices"]:
            yield f"{device['device']}: {device['name']}\n{checkup_text.facts_of(device)}"
            yield Table(checkup_text.format_rows(device["formats"]), checkup_text.FORMAT_NUMBERS)
            yield checkup_text.recipes_of(device["recipes"])
            yield Table([("recommended", "", "because"), *checkup_text.advice_rows(device["recommendation"])])
        for note in self.notes:
            yield f"{note.text} [{note.source}]"

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with a row for each device and format. Speeds are medians.

        Raises:
            ImportError: pandas is not installed; it comes with `castwise[pandas]`.
        """
        columns = ("native", "size", "gflops", "times_fp32", "verdict", "error")
        rows = [
            (device.device, entry["format"], *(_median(entry[column]) for column in columns))
            for device in self.devices
            for entry in device.as_dict()["formats"]
        ]
        return new_frame(("device", "format", *columns), rows)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict."""
        return {**asdict(self), "devices": [device.as_dict() for device in self.devices]}


def doctor() -> Checkup:
    """Measure which formats this machine supports, how fast each is, and recommend a policy and a schedule.

    This multiplies matrices on every device for several seconds; a notebook shows a progress bar meanwhile. Use an idle
    machine. `castwise doctor` prints the same in a terminal.

    Returns:
        The result, which prints as tables. `as_dict()` returns what `castwise doctor --json` prints, and `frame()` a
        pandas frame with a row for each device and format.
    """
    with notebook_progress() as progress:
        return examine(progress or (lambda *_: None))


def examine(progress: Progress = lambda *_: None) -> Checkup:
    """Examine this machine by multiplying matrices on every device for several seconds."""
    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        devices += [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    return Checkup(
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=platform.platform(),
        devices=[_examine(device, BUDGET_S / len(devices), progress) for device in devices],
        notes=notes_on(torch.__version__),
    )


def _examine(device: torch.device, budget_s: float, progress: Progress) -> Device:
    native = of_device(device)
    recipes = {name: runs_natively(recipe, device) for name, recipe in RECIPES.items()}
    speeds = measure(device, to_try(native), budget_s, progress)
    recommendation = recommend(device.type, native, speeds)
    if device.type == "cpu":
        capabilities, limit = get_capabilities(), limit_of_onednn()
        return Device(
            device="cpu",
            name=str(capabilities.get("cpu_name") or platform.processor()),
            threads=torch.get_num_threads(),
            vectors=torch.backends.cpu.get_cpu_capability(),
            units={name: units(DTYPES[name], capabilities) for name in ("bf16", "fp16")},
            limit=None if limit is None else "=".join(limit),
            capability=None,
            memory_bytes=None,
            native=native,
            recipes=recipes,
            speeds=speeds,
            recommendation=recommendation,
        )
    is_cuda = device.type == "cuda"
    return Device(
        device=str(device),
        name=torch.cuda.get_device_name(device) if is_cuda else device.type,
        threads=None,
        vectors=None,
        units=None,
        limit=None,
        capability=torch.cuda.get_device_capability(device) if is_cuda and torch.version.hip is None else None,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        native=native,
        recipes=recipes,
        speeds=speeds,
        recommendation=recommendation,
    )


def _median(value: Any) -> Any:
    return value["median"] if isinstance(value, dict) else value


def _rounded(quartiles: Quartiles) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in asdict(quartiles).items()}
