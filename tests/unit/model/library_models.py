"""Real libraries where they are installed and work with the torch that is here."""

import importlib
import warnings

import pytest


def real(library):
    """Return the library; skip the test where it cannot be imported, for whatever reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(library)
    except Exception as failure:  # noqa: BLE001 - one made for another torch fails in its own way
        pytest.skip(f"no {library} here: {type(failure).__name__}: {failure}")
