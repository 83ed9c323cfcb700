"""Scenes as images, with Pillow; the only module that imports it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstack.programs.pictures.scene import Bar, Scene

_PANEL = 260  # width in pixels
_LINE = 18  # height of a line of text
_SIZE = 13  # font size
_LEAST = 360  # height of small pictures, which are enlarged by a whole factor
_MARGIN = 10
_BACK, _TEXT, _BAR, _CHOSEN = (24, 26, 32), (230, 230, 230), (70, 90, 130), (230, 150, 50)


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
