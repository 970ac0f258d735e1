"""Judging a language model: perplexity of text, LAMBADA's last words, the tasks of lm-eval, and counting as a rival."""

from relinear.evaluate.language import Lambada, Perplexity, lambada, lm_eval, perplexity
from relinear.evaluate.ngram import KneserNey

__all__ = ["KneserNey", "Lambada", "Perplexity", "lambada", "lm_eval", "perplexity"]
