"""The ``relinear`` command: one small file a command, and what commands share (options, errors, progress)."""
