"""What a recorded run says: its facts, advice, verdict and figures, and the page that shows them."""
