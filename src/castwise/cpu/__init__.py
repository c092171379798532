"""The counterpart of `torch.cpu`, which contains only `amp`."""

from castwise.cpu import amp

__all__ = ["amp"]
