"""The ``lowtide`` command, with one file per subcommand."""
