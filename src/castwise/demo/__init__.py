"""`castwise demo`: a small GPT trained in three precisions, by torch.amp and by castwise, side by side."""
