"""Pure planning: who writes which bytes. No torch, no I/O."""
