"""Timings of operators and models against dense layers, in one process."""
