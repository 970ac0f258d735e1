"""Define every operator's maths as plain functions of tensors: the readable reference for all kernels."""
