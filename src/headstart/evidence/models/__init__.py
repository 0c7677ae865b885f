"""Whole models prefilled under several arms (`headstart bench model`).

It needs the extra `models`.
"""
