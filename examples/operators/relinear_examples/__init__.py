"""Structured matrices of the literature as operators for relinear, a file each."""
