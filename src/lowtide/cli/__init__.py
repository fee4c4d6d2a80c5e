"""The ``lowtide`` command, one subcommand per file."""
