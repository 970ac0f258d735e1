"""Settings that users write, as YAML, text or keyword arguments, and the messages about wrong ones."""
