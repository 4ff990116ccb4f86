"""How many bytes HiSparse takes on the device and on the host, and how many requests fit. Standard library only."""
