"""What is known of versions of torch, each with where it was found out."""

from __future__ import annotations

from dataclasses import dataclass

from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Note:
    """A fact about versions of torch.

    Attributes:
        text: The fact.
        source: Where it is tested, or was read.
    """

    text: str
    source: str


# Each from one version up to before another; None has no end.
_NOTES: tuple[tuple[str | None, str | None, Note], ...] = (
    (
        None,
        "2.13",
        Note(
            "castwise is tested with torch 2.13; of older ones, the sources of 2.11 were read.",
            "castwise/_torch_private.py",
        ),
    ),
    (
        None,
        "2.13",
        Note(
            "What torch.compile compiles in a region with a policy runs its backward under autocast: the setting that "
            "decides it (torch._functorch.config.backward_pass_autocast) is one for all threads before 2.13, and a "
            "policy leaves it alone.",
            "castwise/_torch_private.py; torch/utils/_config_module.py of 2.11",
        ),
    ),
    (
        "2.13",
        None,
        Note(
            "torch.autocast no longer loses the gradients of a weight whose cast it has cached under torch.no_grad().",
            "tests/doctor/test_notes.py",
        ),
    ),
    (
        "2.13",
        "2.14",
        Note(
            "The faults of torch.amp that castwise's README lists are faults of this version.",
            "tests/amp/test_torch_is_wrong.py and the tests beside it",
        ),
    ),
    (
        "2.14",
        None,
        Note(
            "This torch is newer than 2.13, which castwise is tested with: private names it uses may have moved.",
            "castwise/_torch_private.py",
        ),
    ),
)


def notes_on(version: str) -> list[Note]:
    """Return what is known of a version of torch.

    Args:
        version: Such as `torch.__version__`.

    Example:
        >>> [note.source for note in notes_on("2.14.1+cu130")]
        ['tests/doctor/test_notes.py', 'castwise/_torch_private.py']
    """
    this = TorchVersion(version)
    return [
        note for since, before, note in _NOTES if (since is None or this >= since) and (before is None or this < before)
    ]
