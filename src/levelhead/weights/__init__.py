"""From any checkpoint or live module to one convention: the AttentionView of a layer."""
