"""Softmax extend attention in Triton, for NVIDIA and AMD."""
