"""Frozen values that the whole library speaks in: no torch, no I/O, no clock."""
