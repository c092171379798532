"""Find mixed-precision mistakes in a training script while it runs. One module per kind of evidence."""
