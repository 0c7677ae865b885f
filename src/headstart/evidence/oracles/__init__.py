"""What is right, from elsewhere: float64 definitions, and implementations that nobody here wrote.

Nothing of headstart's implementations is used here. Tensors come in any float dtype and are read as
they are, so an error measured against an oracle is the error after the inputs were rounded.
"""
