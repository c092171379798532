"""Gradient scaling for models that are sharded over ranks."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
else:
    __getattr__, __dir__ = face(__name__, {"ShardedGradScaler": "sharded_grad_scaler"}, ["sharded_grad_scaler"])

__all__ = ["ShardedGradScaler"]
