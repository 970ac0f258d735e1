"""Operators and models on the clock, against dense layers in the same process."""
