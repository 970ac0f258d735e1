"""The twins of ``functional``: the same names, arguments and results, in less time and memory.

Words: a twin is such a function. It runs in one of several ``forms``, which stand in a list above it. A form consists
of torch's operations (``cpu`` has what twins share), or of a kernel: C++ (``native``) or ``triton``.
"""
