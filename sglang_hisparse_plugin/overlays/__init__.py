"""All overlays, in the order in which they are applied."""
