"""Sharpness-aware minimisation and the training loop; the judge is an argument."""
