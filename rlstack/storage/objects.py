"""The objects of a bucket below a prefix: whole or absent, and written under conditions.

obstore (the extra `store`) speaks to S3, Google Cloud Storage and Azure. An object is written in
one request, so that it is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

# A scheme, and the variables with which obstore finds credentials and servers.
SCHEMES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between two requests for the same
_REQUEST = timedelta(seconds=60)  # for a request with its answer
_CONNECT = timedelta(seconds=5)
_SHOWN = 300  # characters of a library's error


class StoreError(ValueError):
    """A store refuses a request."""


class StoreAwayError(StoreError):
    """A store does not answer."""


class ChangedError(StoreError):
    """An object is not the one that a condition names."""


class Objects:
    """The objects of a bucket below a prefix; safe for several threads."""

    def __init__(self, url: str, patience: float) -> None:
        """Asks nothing yet.

        Args:
          url: SCHEME://BUCKET/PREFIX.
          patience: seconds for which a request is repeated while the store does not answer.

        Raises:
          StoreError: there is no store for the scheme.
        """
        scheme, _, rest = url.partition("://")
        self.url = url
        self._bucket, _, prefix = rest.partition("/")
        self._root = f"{scheme}://{self._bucket}"
        self._prefix = f"{prefix}/" if prefix else ""
        self._patience = patience
        self._given_up = threading.Event()
        if scheme not in SCHEMES:
            raise StoreError(
                f"{url} must begin with {', '.join(f'{one}://' for one in SCHEMES)}, whose stores "
                "have the conditional writes that a run needs; a directory has no scheme."
            )
        self._variables = SCHEMES[scheme]

    @functools.cached_property
    def _library(self) -> Any:
        """The package obstore.

        Raises:
          StoreError: it is not installed.
        """
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ModuleNotFoundError as error:
            raise StoreError(
                f"{self.url} needs the package obstore: pip install 'rlstack[store]'; got {error}."
            ) from error
        return obstore

    @functools.cached_property
    def _store(self) -> Any:
        """The client.

        Raises:
          StoreError: it cannot be made with the environment variables.
        """
        make = self._library.store.from_url
        try:
            return make(
                self._root,
                client_options={
                    "timeout": _REQUEST,
                    "connect_timeout": _CONNECT,
                    "allow_http": True,  # only an endpoint that the user names has this scheme
                },
                retry_config={"max_retries": 0, "retry_timeout": _REQUEST},
            )
        except Exception as error:
            raise StoreError(
                f"{self.url} cannot be used with these environment variables ({self._variables}): "
                f"{_told(error)}."
            ) from error

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Returns the content of an object and its tag; None if there is no such object.

        Raises:
          StoreError: the store refuses it.
          StoreAwayError: the store does not answer.
        """

        def get() -> tuple[bytes, str]:
            found = self._library.get(self._store, self._prefix + key)
            return bytes(found.bytes()), _tag(found.meta)

        try:
            return self._answer(get)
        except FileNotFoundError:
            return None

    def tag(self, key: str) -> str:
        """Returns the tag of an object, without its content; "" if there is none."""
        try:
            return _tag(self._answer(lambda: self._library.head(self._store, self._prefix + key)))
        except FileNotFoundError:
            return ""

    def put(self, key: str, content: bytes) -> None:
        """Writes an object.

        Raises:
          StoreError: the store refuses it.
          StoreAwayError: the store does not answer.
        """
        self._put(key, content, "overwrite")

    def put_if(self, key: str, content: bytes, tag: str) -> str:
        """Writes an object if it still has a tag, or if there is none for the tag "".

        A request whose answer is lost may have written it.

        Returns:
          The new tag.

        Raises:
          ChangedError: it has another tag, or there is one.
          StoreError: the store refuses it.
          StoreAwayError: the store does not answer.
        """
        if not tag:
            return self._put(key, content, "create")
        e_tag, _, version = tag.partition(" ")
        known = {"e_tag": e_tag, "version": version}
        return self._put(key, content, known if version else {"e_tag": e_tag})

    def _put(self, key: str, content: bytes, mode: Any) -> str:
        def put() -> str:
            done = self._library.put(
                self._store, self._prefix + key, content, mode=mode, use_multipart=False
            )
            return _tag(done)

        try:
            return self._answer(put)
        except FileNotFoundError as error:
            raise self._no_bucket(error) from error

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; one that is not there is fine."""
        paths = [self._prefix + key for key in keys]
        if paths:
            with contextlib.suppress(FileNotFoundError):
                self._answer(lambda: self._library.delete(self._store, paths))

    def listed(self) -> list[str]:
        """Returns the keys of all objects."""

        def ask() -> list[str]:
            pages = self._library.list(self._store, prefix=self._prefix or None)
            return [str(one["path"]) for page in pages for one in page]

        start = len(self._prefix)
        return [path[start:] for path in self._answer(ask) if path.startswith(self._prefix)]

    def below(self, folder: str) -> tuple[list[str], list[str]]:
        """Returns the names of the objects in a folder, "" for all, and of the folders in it."""
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        found = self._answer(
            lambda: self._library.list_with_delimiter(self._store, prefix=prefix or None)
        )
        objects = [str(one["path"])[len(prefix) :] for one in found["objects"]]
        return objects, [str(one).rstrip("/")[len(prefix) :] for one in found["common_prefixes"]]

    def give_up(self) -> None:
        """Ends the repetition of requests; each is then made once."""
        self._given_up.set()

    def _answer(self, ask: Callable[[], Any]) -> Any:
        """Asks until there is an answer."""
        errors = self._library.exceptions
        until, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                return ask()
            except (errors.AlreadyExistsError, errors.PreconditionError) as error:
                raise ChangedError(f"{self.url} was changed by another command.") from error
            except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
                raise StoreError(
                    f"{self.url}: this user must have the right to list, read, write and delete "
                    f"objects there; the store says: {_told(error)}. Credentials are in "
                    f"{self._variables}."
                ) from error
            except (FileNotFoundError, errors.BaseError) as error:
                if "NoSuchBucket" in str(error):
                    raise self._no_bucket(error) from error
                if isinstance(error, FileNotFoundError):
                    raise
                if time.monotonic() + pause > until or self._given_up.wait(pause):
                    raise StoreAwayError(
                        f"{self.url} does not answer: {_told(error)}. Its server and credentials "
                        f"are in {self._variables}."
                    ) from error
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _no_bucket(self, error: Exception) -> StoreError:
        return StoreError(
            f"{self.url}: the bucket {self._bucket} must exist; the store says: {_told(error)}."
        )


def _tag(about: Any) -> str:
    """Returns what tells an object from those that replace it; Google's store needs its version."""
    return f"{about['e_tag']} {about['version'] or ''}"


def _told(error: Exception) -> str:
    """Returns the short form of a library's error, without answers that repeat a request."""
    text = str(error).partition("Debug source")[0]
    if code := re.search(r"<Code>(\w+)</Code>", text):
        message = re.search(r"<Message>([^<]*)</Message>", text)
        return f"{code[1]}{f', {message[1]}' if message else ''}".rstrip(".")
    return " ".join(text.split())[:_SHOWN].rstrip(".: ")
