"""The gated delta rule: linear attention whose state decays and corrects itself."""
