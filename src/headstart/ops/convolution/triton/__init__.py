"""The short convolution and the gated norm in Triton, one source for NVIDIA and AMD."""
