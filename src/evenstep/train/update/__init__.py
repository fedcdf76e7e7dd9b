"""One update: weighed, planned, run, judged and applied, and what a try that fails has to take back."""
