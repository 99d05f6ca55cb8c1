"""``python -m stretto``."""

from stretto.cli.main import run

if __name__ == "__main__":
    run()
