"""Mixed precision over several processes, at the same relative paths as in torch."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.distributed import fsdp
else:
    __getattr__, __dir__ = face(__name__, {}, ["fsdp"])

__all__ = ["fsdp"]
