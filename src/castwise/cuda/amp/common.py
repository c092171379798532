"""`amp_definitely_not_available`, where `torch.cuda.amp.common` has it."""

from castwise.amp.devices import amp_definitely_not_available

__all__ = ["amp_definitely_not_available"]
