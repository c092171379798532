"""Reports on recorded runs: facts, advice, verdicts, figures, and the HTML page that shows them."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
