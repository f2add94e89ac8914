"""Multilinear algebra that has never heard of a transformer."""
