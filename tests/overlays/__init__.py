"""What the probes say of released and of changed sources."""
