"""What every package needs and none owns: whole files or none, provenance, progress."""
