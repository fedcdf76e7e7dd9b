"""What a run keeps in memory, and what is done where it does not suffice: finer cuts, activations computed again."""
