"""Host memory to storage, in a helper process of its own: no torch, no ranks."""
