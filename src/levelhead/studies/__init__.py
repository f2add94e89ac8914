"""Experiments that can be run again: settings in, a run folder with tables and statements out."""
