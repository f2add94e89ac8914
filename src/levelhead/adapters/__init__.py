"""One file per heavy optional library: importing a file is opting in."""
