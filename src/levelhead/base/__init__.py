"""Plain records, numerics and errors; knows no other folder."""
