"""Triton kernels for NVIDIA GPUs: one file an operator, reached through ``kernels.choice`` alone.

Nothing here is imported before a CUDA tensor asks for it. Every kernel is an opaque ``torch.library`` operator with a
shape rule and a backward, so that it goes through ``torch.compile(fullgraph=True)``. Tile sizes are untuned.
"""
