"""Which op ran where, and in which precision: `castwise.trace`, and the dispatch mode and hooks it is made of."""
