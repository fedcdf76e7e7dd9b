"""One update: weigh, run, judge, apply, and roll back."""
