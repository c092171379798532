"""`GradScaler`, at the path of `torch.cpu.amp.grad_scaler`."""

from __future__ import annotations

from torch.cpu.amp import grad_scaler as torchs

from castwise import amp
from castwise._deprecation import deprecated

__all__ = ["GradScaler"]


class GradScaler(amp.GradScaler, torchs.GradScaler):
    """Deprecated: `castwise.GradScaler("cpu", ...)`, with the same arguments after the device.

    Args:
        init_scale: As for `castwise.GradScaler`.
        growth_factor: As for `castwise.GradScaler`.
        backoff_factor: As for `castwise.GradScaler`.
        growth_interval: As for `castwise.GradScaler`.
        enabled: As for `castwise.GradScaler`.

    Warns:
        FutureWarning: Always.
    """

    @deprecated("use castwise.GradScaler('cpu', ...)", category=FutureWarning)
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
