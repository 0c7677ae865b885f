"""Which configuration of a kernel is the fastest, and how far the rule is from it.

`points` says which calls a case stands for, `candidates` what is tried, `sweep` tries it, and what
is found becomes rows of a device's table. Inputs are drawn from a seed; nothing is tuned while a
model is served.
"""
