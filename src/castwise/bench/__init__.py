"""What `castwise bench` measures: castwise beside torch.amp, one file per benchmark, on whatever machine it runs."""
