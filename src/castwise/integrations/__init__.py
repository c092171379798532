"""castwise inside of other frameworks: one file for each, which is imported only by whoever uses it."""
