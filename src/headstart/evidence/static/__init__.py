"""What a compiler makes of every kernel configuration, for eight targets, without a GPU.

`worker` compiles and reads the machine code in a process of its own, `collect` starts it (once for
each Triton version) and survives its crashes, `budgets` says what a target allows, `diff` compares
instructions.
"""
