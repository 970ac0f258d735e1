"""Reading and changing what a model computes: latents and other activations, interventions, the shared context."""

from relinear.core.context import context
from relinear.core.latents import Add, Clamp, Inject, Patch, intervene, latents, moment_alignment

__all__ = ["Add", "Clamp", "Inject", "Patch", "context", "intervene", "latents", "moment_alignment"]
