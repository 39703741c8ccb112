"""The command line; draws tables, decides nothing."""
