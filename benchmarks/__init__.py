"""What the documentation says about speed, memory and learning, measured. `python -m benchmarks --help` begins here."""
