"""What a run is between two updates, as trees by name, and the checkpoints and the folder in which it is kept."""
