"""Tables in, windows out; knows no model."""
