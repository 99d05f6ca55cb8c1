"""The command line: one module per command, which parses flags, calls the library and prints."""
