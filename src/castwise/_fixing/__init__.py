"""Edits of a script that correct its mistakes: what `castwise fix` prints."""
