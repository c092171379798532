"""The counterpart of `torch.cuda`, which contains only `amp`."""

from castwise.cuda import amp

__all__ = ["amp"]
