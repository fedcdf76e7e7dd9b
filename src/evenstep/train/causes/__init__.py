"""Why an update was aborted: which micro-batches, tasks and modules made it so."""
