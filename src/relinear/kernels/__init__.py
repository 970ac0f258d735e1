"""Compute the functions of ``functional`` in less time and memory: same names, equal results.

A kernel has several ``implementations``, listed above it: torch's operations, C++ (``native``) or ``triton``.
"""
