"""Speeds of the Contextually Guided Transformer."""
