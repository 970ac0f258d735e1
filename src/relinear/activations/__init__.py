"""Read and change what a model computes: hook points, latents, interventions, and the shared context."""

from relinear.activations.hooks import hook_points, observe_hook_points
from relinear.activations.interventions import Add, Clamp, Patch, intervene
from relinear.activations.interventions import Inject as Inject  # an earlier name, which works for one more version
from relinear.activations.latent_recording import latents, moment_alignment
from relinear.activations.shared_context import context

__all__ = [
    "Add",
    "Clamp",
    "Patch",
    "context",
    "hook_points",
    "intervene",
    "latents",
    "moment_alignment",
    "observe_hook_points",
]
