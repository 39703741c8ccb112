"""Pure deciders: what is saved when, and what is kept. No torch, no I/O, no clock."""
