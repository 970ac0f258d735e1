"""Read and change what a model computes: hook points, latents, interventions, and the shared context."""

from relinear.activations.hooks import (
    Activation,
    HasHookPoints,
    HookPoint,
    Intervention,
    LatentOperator,
    hook_points,
    observe,
)
from relinear.activations.interventions import Add, Clamp, Patch, intervene
from relinear.activations.interventions import Inject as Inject  # an earlier name, which works for one more version
from relinear.activations.latent_recording import latents, moment_alignment
from relinear.activations.shared_context import context, current_context

__all__ = [
    "Activation",
    "Add",
    "Clamp",
    "HasHookPoints",
    "HookPoint",
    "Intervention",
    "LatentOperator",
    "Patch",
    "context",
    "current_context",
    "hook_points",
    "intervene",
    "latents",
    "moment_alignment",
    "observe",
]
