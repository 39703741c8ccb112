"""Drives the parts: straight-line scripts that read as the list of phases."""
