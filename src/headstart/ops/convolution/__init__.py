"""The short causal convolution and the gated norm around the gated delta rule."""
