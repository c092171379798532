"""What a recorded run says: its facts, advice, verdict and figures, and the page that shows them."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
