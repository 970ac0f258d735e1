"""Judging a language model: perplexity of text, LAMBADA's last words, and the tasks of lm-eval."""

from relinear.evaluate.language import Lambada, Perplexity, lambada, lm_eval, perplexity

__all__ = ["Lambada", "Perplexity", "lambada", "lm_eval", "perplexity"]
