"""Serving with vLLM, with the plugin and without: servers, vLLM's own benchmark, paired rounds."""
