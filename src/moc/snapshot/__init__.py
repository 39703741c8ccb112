"""Device to host: the memory tier, its copies, and the fence that guards them."""
