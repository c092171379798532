"""Training programs, and changes of their source text that are rewrites, losses of precision, or bugs."""
