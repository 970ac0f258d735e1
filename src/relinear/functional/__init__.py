"""The maths of every operator as plain functions of tensors: the readable reference for all kernels."""
