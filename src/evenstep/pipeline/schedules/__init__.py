"""Pipeline schedules: pure functions that give a plan; one file each."""
