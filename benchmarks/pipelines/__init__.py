"""What `make bench NAME=pipeline` measures on its ranks, one file per question."""
