"""The scripts that drive a save and a restore, phase by phase."""
