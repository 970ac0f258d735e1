"""Fast kernels: functions of ``functional`` under the same names, with equal results, in less time and memory.

A kernel has several ``implementations``, listed above it: torch's operations, C++ (``native``) or ``triton``.
"""
