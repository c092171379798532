"""Mixed precision over several processes, at torch's own relative paths."""
