"""Gradient scaling for models that are split over ranks."""
