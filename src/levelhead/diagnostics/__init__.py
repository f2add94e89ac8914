"""Functions of a model on data: attention maps, sharpness, similarity."""
