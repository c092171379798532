"""The counterpart of `torch.cuda`, for the sake of `castwise.cuda.amp`."""

from castwise.cuda import amp

__all__ = ["amp"]
