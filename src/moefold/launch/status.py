"""Exit statuses of ranks and commands. Torch-free."""

EXIT_FAILED = 1
"""The command ran and its answer is no, or a rank failed."""
EXIT_USER_ERROR = 2
"""The user's settings cannot work; a message has said why."""
SIGNAL_STATUS = 128
"""A run that a signal ended exits with 128 + its number, as shells do: 130 for Ctrl-C."""
EXIT_EXPLAINED = 70
"""A rank's own status after a fault of the run that a message has named; the command exits with EXIT_FAILED."""
