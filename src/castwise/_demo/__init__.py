"""`castwise demo`: train a small GPT in three precisions with torch.amp and with castwise, side by side."""
