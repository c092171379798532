"""The version; the package itself may not be asked by its own parts, which it imports."""

__version__ = "0.2.0"
