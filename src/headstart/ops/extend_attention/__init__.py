"""Softmax extend attention: new tokens over their cached prefixes and themselves."""
