"""Operators and models on the clock, against dense layers and named peers in the same process."""
