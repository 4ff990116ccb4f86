"""One file per group of probes."""
