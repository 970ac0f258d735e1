"""The operator contract, the config registry and the context carrier."""
