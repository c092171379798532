"""The code shared by `integrations.lightning` and `integrations.pytorch_lightning`, without Lightning's classes."""
