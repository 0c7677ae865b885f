"""Adapters that speak the neighbours' dialects and convert explicitly."""
