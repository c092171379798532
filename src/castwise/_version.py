"""The version, in a module that all parts of the package can import without a cycle."""

__version__ = "0.2.0"
