"""Pure deciders: whence each lost piece comes back after a fault. No torch, no I/O, no clock."""
