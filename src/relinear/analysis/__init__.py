"""Analyse a trained model on real text: ranks, gates, tokens, modulators and causality, with figures."""
