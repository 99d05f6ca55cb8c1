"""Access to the real model libraries, where they are installed."""

import importlib
import warnings

import pytest


def real(library):
    """Return the imported library; skip the test if it cannot be imported, for any reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(library)
    except Exception as failure:  # noqa: BLE001 - one built for another torch may raise anything
        pytest.skip(f"no {library} here: {type(failure).__name__}: {failure}")
