"""The version, as records of runs state it."""

__version__ = "0.2.0"
