"""Precision policies: which module and which op runs in which precision, and what holds a model to it."""
