"""A small MoE trained twice, once with a fault: what the library does, measured."""
