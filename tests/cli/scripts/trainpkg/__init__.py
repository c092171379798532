"""Which standard library module does a snippet come from?  A tiny GRU decides.

Run with ``python -m trainpkg``.
"""
from .config import TrainConfig
from .model import SnippetClassifier
from .train import fit

__all__ = ["SnippetClassifier", "TrainConfig", "fit"]
