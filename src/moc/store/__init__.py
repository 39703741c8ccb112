"""Bytes by key: local folders and object stores. No torch."""
