"""Writes images to a video file: GIF with Pillow, MP4 and WebM with PyAV."""

from __future__ import annotations

import contextlib
import importlib.util
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlstack.storage import files

_CODECS = {".mp4": "libx264", ".webm": "libvpx-vp9"}
_SUFFIXES = (".gif", *_CODECS)


class Video(Protocol):
    """A video that is being written."""

    def write(self, image: np.ndarray) -> None:
        """Adds an image, uint8 [H, W, 3]; all have one size."""

    def close(self) -> None:
        """Ends the file."""


def check_video(path: Path) -> None:
    """Checks that a video can be written, before anything is played.

    Raises:
      ValueError: the kind of file is not known, a package is missing, or there is no such folder.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"watch: --video must end with {', '.join(_SUFFIXES)}; got {path}. A GIF needs the "
            "fewest packages."
        )
    if not path.absolute().parent.is_dir():
        raise ValueError(f"watch: --video must be in a folder that exists; got {path}.")
    if missing := missing_packages(path.suffix.lower()):
        raise ValueError(
            f"watch: --video {path} needs {' and '.join(missing)}, which the extra `video` of "
            "rlstack brings; `rlstack doctor` prints the command. Without --video the terminal "
            "shows the run."
        )


def missing_packages(suffix: str) -> list[str]:
    """Returns the packages that a kind of file, such as ".mp4", needs and that are missing."""
    needed = {"PIL": "Pillow"} | ({} if suffix == ".gif" else {"av": "PyAV"})
    return [name for module, name in needed.items() if importlib.util.find_spec(module) is None]


@contextlib.contextmanager
def open_video(path: Path, fps: float) -> Any:
    """Yields a `Video`; the file gets its final name only once it is complete.

    Raises:
      ValueError: the video cannot be written; see `check_video`.
    """
    check_video(path)
    with files.replacing(path) as partial:
        made = _Gif if path.suffix.lower() == ".gif" else _Encoded
        video: Video = made(partial, fps)
        try:
            yield video
        finally:
            video.close()


class _Gif:
    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._milliseconds = path, 1000 / fps
        self._images: list[Any] = []

    def write(self, image: np.ndarray) -> None:
        from PIL import Image

        # A palette needs a third of the memory of the colours.
        self._images.append(Image.fromarray(image).quantize(128))

    def close(self) -> None:
        if self._images:
            first, *others = self._images
            first.save(
                self._path,
                save_all=True,
                append_images=others,
                duration=max(20, round(self._milliseconds)),
                loop=0,
            )


class _Encoded:
    def __init__(self, path: Path, fps: float) -> None:
        import av

        self._av = av
        self._container: Any = av.open(str(path), "w")
        rate = Fraction(fps).limit_denominator(1000)
        self._stream: Any = self._container.add_stream(_CODECS[path.suffix.lower()], rate=rate)
        self._stream.pix_fmt = "yuv420p"
        self._stream.options = {"crf": "20"}
        self._started = False

    def write(self, image: np.ndarray) -> None:
        if not self._started:
            self._stream.height, self._stream.width = image.shape[:2]
            self._started = True
        frame = self._av.VideoFrame.from_ndarray(image, format="rgb24")
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        if self._started:
            self._container.mux(self._stream.encode())
        self._container.close()
