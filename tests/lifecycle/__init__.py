"""Requests from arrival to end on the real scheduler of each supported release, on a CPU."""
