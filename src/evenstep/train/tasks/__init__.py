"""What a batch means, for one task and for several that are trained together."""
