"""The exit codes of the command line, in one place: scripts and schedulers depend on them."""

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_REQUEUE = 75  # sysexits' EX_TEMPFAIL: stopped by SIGTERM and saved, wants to be run again
EXIT_INTERRUPTED = 130  # as a shell says of a command that Ctrl-C has ended
FINAL = (EXIT_DONE, EXIT_CONFIG, EXIT_REQUEUE, EXIT_INTERRUPTED)  # after which no rank is started again

CODE_FILE = "_EVENSTEP_CODE_FILE"  # where rank 0 leaves its exit code for evenstep's launcher
