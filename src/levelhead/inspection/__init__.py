"""From a checkpoint to what its heads are like: inspect one, compare two, verify the catalogue."""
