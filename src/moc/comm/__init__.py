"""Ranks: small values between processes, and the only importer of torch.distributed."""
