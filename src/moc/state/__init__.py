"""Live objects described as pieces, and pieces as views of live tensors. Moves no bytes."""
