"""Time operators and whole models against dense layers, taking turns in one process."""
