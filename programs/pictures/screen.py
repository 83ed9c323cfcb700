"""Shows scenes in the terminal, or as images: in a window, or as a video.

`Drawer` draws the images with Pillow, which the terminal does not need.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlstack.programs.pictures.scene import Bar, Scene
from rlstack.programs.pictures.stage import Picture
from rlstack.programs.pictures.video import open_video

_HOLD = 1.0  # seconds for which a video or a window shows the last step of an episode
_COLUMNS = 72  # width of a picture in the terminal

# Of images.
_PANEL = 260  # width in pixels
_LINE = 18  # height of a line of text
_SIZE = 13  # font size
_LEAST = 360  # height of small pictures, which are enlarged by a whole factor
_MARGIN = 10
_BACK, _TEXT, _BAR, _CHOSEN = (24, 26, 32), (230, 230, 230), (70, 90, 130), (230, 150, 50)

Show = Callable[[Scene], None]


class _Closed(Exception):  # noqa: N818  (a request, not an error)
    """The user has closed the window."""


def open_screen(
    video: Path | None, fps: float, console: Console | None = None, *, window: bool = False
) -> AbstractContextManager[Show]:
    """Returns the context of a function that shows scenes.

    If a window is closed, the body of the context ends there, without an error.

    Args:
      video: the file to write; None for the terminal or a window.
      fps: scenes per second.
      console: the console of the terminal; standard output by default.
      window: True to open a window.

    Raises:
      ValueError: the video cannot be written, see `rlstack.programs.pictures.video.check_video`; no
        window can be opened; or ``fps`` is not positive and finite.
    """
    if not 0 < fps < math.inf:
        raise ValueError(f"fps (--fps) must be positive and finite; got {fps:g}.")
    if video is not None:
        return _in_video(video, fps)
    if window:
        return _in_window(fps)
    return _in_terminal(console or Console(highlight=False), fps)


class Drawer:
    """Draws scenes as images. All images have the size of the first one."""

    def __init__(self) -> None:
        """Loads the fonts.

        Raises:
          ImportError: Pillow is not installed.
        """
        from PIL import Image, ImageDraw, ImageFont

        self._image, self._draw = Image, ImageDraw
        self._font: Any = ImageFont.load_default(size=_SIZE)
        self._board: Any = ImageFont.load_default_imagefont()  # all characters have one width
        self._size: tuple[int, int] | None = None

    def __call__(self, scene: Scene) -> np.ndarray:
        """Returns the scene as uint8 [H, W, 3]; height and width are even."""
        picture = self._picture(scene)
        if self._size is None:
            lines = 4 + len(scene.lines) + sum(len(bars) + 1 for _, bars in scene.bars)
            height = max(picture.height, lines * _LINE) + 2 * _MARGIN
            width = picture.width + _PANEL + 3 * _MARGIN
            self._size = (width + width % 2, height + height % 2)
        canvas = self._image.new("RGB", self._size, _BACK)
        canvas.paste(picture, (_MARGIN, _MARGIN))
        left = self._size[0] - _PANEL - _MARGIN
        draw = self._draw.Draw(canvas)
        draw.rectangle((left - _MARGIN, 0, *self._size), fill=_BACK)
        top = _MARGIN
        for line in scene.lines:
            draw.text((left, top), line, fill=_TEXT, font=self._font)
            top += _LINE
        for title, bars in scene.bars:
            draw.text((left, top), title, fill=_TEXT, font=self._font)
            top += _LINE
            for bar in bars:
                self._bar(draw, left, top, bar)
                top += _LINE
        return np.asarray(canvas)

    def _picture(self, scene: Scene) -> Any:
        if isinstance(scene.picture, str):
            text = scene.picture.encode("latin-1", "replace").decode("latin-1")
            probe = self._draw.Draw(self._image.new("RGB", (1, 1)))
            _, _, right, bottom = probe.multiline_textbbox((0, 0), text, font=self._board)
            image = self._image.new("RGB", (int(right) + 1, int(bottom) + 1), _BACK)
            drawing = self._draw.Draw(image)
            drawing.multiline_text((0, 0), text, fill=_TEXT, font=self._board)
        else:
            image = self._image.fromarray(scene.picture)
        factor = max(1, -(-_LEAST // image.height)) if image.height < _LEAST else 1
        factor = min(factor, max(1, 1000 // image.width))
        nearest = self._image.Resampling.NEAREST
        return image.resize((image.width * factor, image.height * factor), nearest)

    def _bar(self, draw: Any, left: int, top: int, bar: Bar) -> None:
        width = round(bar.share * (_PANEL - 2))
        colour = _CHOSEN if bar.chosen else _BAR
        draw.rectangle((left, top + 1, left + width, top + _LINE - 3), fill=colour)
        draw.text((left + 4, top), f"{bar.label}  {bar.text}", fill=_TEXT, font=self._font)


@contextlib.contextmanager
def _in_video(path: Path, fps: float) -> Iterator[Show]:
    draw = Drawer()
    with open_video(path, fps) as video:

        def show(scene: Scene) -> None:
            image = draw(scene)
            for _ in range(_repeats(scene, fps)):
                video.write(image)

        yield show


@contextlib.contextmanager
def _in_terminal(console: Console, fps: float) -> Iterator[Show]:
    if not console.is_terminal:  # a file or a pipe gets every step
        yield lambda scene: console.print(_shown(scene))
        return
    wait = _pace(fps)
    with Live(console=console, auto_refresh=False) as live:

        def show(scene: Scene) -> None:
            wait()
            live.update(_shown(scene), refresh=True)

        yield show


@contextlib.contextmanager
def _in_window(fps: float) -> Iterator[Show]:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # signals are rlstack's
    try:
        import pygame

        draw = Drawer()
        pygame.display.init()
    except ImportError as error:
        raise ValueError(
            f"watch: --window needs the extra `window` of rlstack: {error}."
        ) from error
    except pygame.error as error:
        raise ValueError(
            f"watch: --window needs a display: {error}. Without it the terminal shows the run, and "
            "--video writes a file."
        ) from error
    wait = _pace(fps)

    def show(scene: Scene) -> None:
        image = draw(scene)
        size = image.shape[1::-1]
        window = pygame.display.get_surface() or pygame.display.set_mode(size)
        window.blit(pygame.image.frombuffer(image.tobytes(), size, "RGB"), (0, 0))
        pygame.display.flip()
        for _ in range(_repeats(scene, fps)):
            wait()
            for event in pygame.event.get():
                escape = event.type == pygame.KEYDOWN and event.key == pygame.K_ESCAPE
                if escape or event.type == pygame.QUIT:
                    raise _Closed

    try:
        pygame.display.set_caption("rlstack watch")
        yield show
    except _Closed:
        pass
    finally:
        pygame.display.quit()


def _pace(fps: float) -> Callable[[], None]:
    """Returns a function that waits, so that it returns at most this many times per second."""
    due = time.monotonic()

    def wait() -> None:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due, time.monotonic() - 1 / fps) + 1 / fps

    return wait


def _repeats(scene: Scene, fps: float) -> int:
    """Returns the number of video pictures that show a scene."""
    return max(1, round(_HOLD * fps)) if scene.is_last else 1


def _shown(scene: Scene) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    words = Text("\n".join(scene.lines))
    for title, bars in scene.bars:
        words.append(f"\n{title}" if title else "")
        for bar in bars:
            words.append("\n").append(_bar(bar))
    table.add_row(Panel(picture_as_text(scene.picture), expand=False), words)
    return Group(table)


def _bar(bar: Bar) -> Text:
    blocks = "█" * round(10 * bar.share)
    mark = "*" if bar.chosen else " "
    return Text(f"{mark} {bar.label} {blocks} {bar.text}", "bold" if bar.chosen else "")


def picture_as_text(picture: Picture) -> Text:
    """Returns a picture as text; each character shows two pixels, one above the other."""
    if isinstance(picture, str):
        return Text(picture)
    height, width = picture.shape[:2]
    columns = min(_COLUMNS, width)
    rows = max(2, round(height * columns / width)) // 2 * 2
    ys = (np.arange(rows) * height / rows).astype(int)
    xs = (np.arange(columns) * width / columns).astype(int)
    pixels = picture[ys][:, xs]
    text = Text()
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        for above, below in zip(upper.tolist(), lower.tolist(), strict=True):
            style = "rgb({},{},{}) on rgb({},{},{})".format(*above, *below)
            text.append("▀", style)
        text.append("\n")
    text.rstrip()
    return text
