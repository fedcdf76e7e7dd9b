"""What is found out by trying, before or between updates, and leaves everything as it was."""
