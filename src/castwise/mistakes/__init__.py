"""Mistakes that training scripts make with mixed precision, found while they run: a file for each kind of evidence."""
