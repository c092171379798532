"""The counterpart of `torch.cpu`, for the sake of `castwise.cpu.amp`."""

from castwise.cpu import amp

__all__ = ["amp"]
