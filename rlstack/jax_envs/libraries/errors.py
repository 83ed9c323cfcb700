"""What the adapters say where a library is missing."""

from __future__ import annotations


def not_installed(name: str, library: str, extra: str, error: ImportError) -> ValueError:
    """Returns the error for an environment whose library cannot be imported.

    Args:
      name: of the environment, as users give it.
      library: its name in text.
      extra: of rlstack, which installs the library.
      error: why it cannot be imported.
    """
    return ValueError(
        f"JAX environment: {name} needs {library}, which cannot be imported: {error}. "
        f"pip install 'rlstack[{extra}]', or name a callable as module:callable."
    )
