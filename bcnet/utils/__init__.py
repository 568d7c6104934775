"""What every room needs and none owns: whole files or none, provenance, progress."""
