"""The error for an environment whose library is not installed."""

from __future__ import annotations


def not_installed(name: str, library: str, extra: str, error: ImportError) -> ValueError:
    """Returns a ValueError that names the missing library and the extra that installs it.

    Args:
      name: name of the environment, as the user gave it.
      library: name of the library, for the message.
      extra: name of rlstack's extra that installs the library.
      error: the error of the import.
    """
    return ValueError(
        f"JAX environment: {name} needs {library}, which cannot be imported: {error}. "
        f"pip install 'rlstack[{extra}]', or name a callable as module:callable."
    )
