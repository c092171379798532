"""What holds in every correct training run, checked while the run goes on, whatever the losses are."""
