"""The benchmarks of `castwise bench`, which compare castwise with torch.amp; one file per benchmark."""
