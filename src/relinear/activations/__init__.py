"""Reading and changing what a model computes: latents and other activations, interventions, the shared context."""

from relinear.activations.interventions import Add, Clamp, Inject, Patch, intervene, latents, moment_alignment
from relinear.activations.shared_context import context

__all__ = ["Add", "Clamp", "Inject", "Patch", "context", "intervene", "latents", "moment_alignment"]
