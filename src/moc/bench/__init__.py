"""`moc bench`: stall, snapshot and persist against the raw limits of the machine, in one run."""
