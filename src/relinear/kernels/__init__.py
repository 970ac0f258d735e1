"""Kernels: faster implementations of the functions in ``functional``, with the same names and results.

A kernel tries several ``implementations``, listed above it: torch's operations, C++ (``native``) or ``triton``.
"""
