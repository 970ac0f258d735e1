"""Explore a model in the browser: its units on real and typed text, and the effect of changing them."""
