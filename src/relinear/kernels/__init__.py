"""The twins of ``functional``: the same names, arguments and results, in less time and memory.

Words: a twin is such a function. It runs in one of several forms, which ``choice`` asks about. A form may consist of
torch's operations, in portions of rows where they are many (``cpu``), or of a kernel: C++ (``native``) or ``triton``.
"""
