"""`amp_definitely_not_available`, at the path of `torch.cuda.amp.common`."""

from castwise.amp._devices import amp_definitely_not_available

__all__ = ["amp_definitely_not_available"]
