"""The gated delta rule on NVIDIA Hopper: the shared passes and a scan written in Gluon."""
