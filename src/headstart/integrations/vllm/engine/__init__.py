"""The classes that vLLM's engine constructs. Importing them needs vLLM."""
