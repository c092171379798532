"""What `integrations.lightning` and `integrations.pytorch_lightning` share: all but the classes they derive from."""
