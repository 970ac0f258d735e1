"""Analyse a model on real text: ranks, gates, tokens, modulators and causality, with their figures."""
