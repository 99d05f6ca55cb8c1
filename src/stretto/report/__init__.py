"""One self-contained HTML page about one or several runs, readable without a network."""
