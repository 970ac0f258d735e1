"""Read and change what a model computes: latents, interventions, and the shared context."""

from relinear.activations.interventions import Add, Clamp, Inject, Patch, intervene
from relinear.activations.latent_recording import latents, moment_alignment
from relinear.activations.shared_context import context

__all__ = ["Add", "Clamp", "Inject", "Patch", "context", "intervene", "latents", "moment_alignment"]
