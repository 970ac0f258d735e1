"""Evaluate a language model: perplexity, LAMBADA, lm-eval tasks, and an n-gram baseline."""

from relinear.evaluate.language import Lambada, Perplexity, lambada, lm_eval, perplexity
from relinear.evaluate.ngram import KneserNey

__all__ = ["KneserNey", "Lambada", "Perplexity", "lambada", "lm_eval", "perplexity"]
