"""Facts about versions of torch, with their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Note:
    """A fact about versions of torch.

    Attributes:
        text: The fact.
        source: The test or source file that shows it.
    """

    text: str
    source: str


_IN_PART = Note(
    "castwise is tested in full with torch 2.11, 2.13 and 2.15, and with a smaller set of tests on 2.12 and 2.14.",
    "benchmarks/torch_versions.py",
)
# Each note applies from the first version up to but excluding the second; None means no end.
_NOTES: tuple[tuple[str | None, str | None, Note], ...] = (
    ("2.12", "2.13", _IN_PART),
    ("2.14", "2.15", _IN_PART),
    (
        None,
        "2.13",
        Note(
            "Code compiled by torch.compile in a region with a policy runs its backward under autocast. Before 2.13, "
            "the setting for this (torch._functorch.config.backward_pass_autocast) is shared by all threads, so a "
            "policy does not change it.",
            "castwise/_torch_private.py; torch/utils/_config_module.py of 2.11",
        ),
    ),
    (
        "2.13",
        None,
        Note(
            "torch.autocast no longer loses the gradients of a weight whose cast it cached under torch.no_grad().",
            "tests/doctor/test_notes.py",
        ),
    ),
    (
        None,
        "2.16",
        Note(
            "This version of torch still has the torch.amp bugs listed in castwise's README.",
            "tests/amp/test_torch_is_wrong.py and the tests beside it",
        ),
    ),
    (
        "2.16",
        None,
        Note(
            "This torch is newer than 2.15, the newest castwise is tested with: private names it uses may have moved.",
            "benchmarks/torch_versions.py",
        ),
    ),
)


def notes_on(version: str) -> list[Note]:
    """Return the notes that apply to a version of torch.

    Args:
        version: Such as `torch.__version__`.

    Example:
        >>> [note.source for note in notes_on("2.16")]
        ['tests/doctor/test_notes.py', 'benchmarks/torch_versions.py']
    """
    release = re.match(r"\d+(\.\d+)*", version)  # a nightly build counts as the release that it precedes
    this = TorchVersion(release[0] if release else version)
    return [
        note for since, before, note in _NOTES if (since is None or this >= since) and (before is None or this < before)
    ]
