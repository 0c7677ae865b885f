"""The gated delta rule in Triton, one source for NVIDIA and AMD."""
