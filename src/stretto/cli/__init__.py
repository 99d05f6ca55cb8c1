"""The command line: one module per verb; parse, call one library function, print."""
