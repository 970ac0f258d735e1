"""The version, as records of runs state it."""

__all__ = ["__version__"]

__version__ = "0.2.0"
