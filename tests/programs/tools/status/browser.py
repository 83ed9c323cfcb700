"""A headless Chromium, driven through pipes by the DevTools protocol."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

# Its names, by which it is found on the path.
FOUND = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


class Page:
    """One page in a browser."""

    def __init__(self, commands, answers):
        self._commands, self._answers = commands, answers
        self._left, self._number, self._session = b"", 0, {}

    def open(self, url, width=1320, height=1500):
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send("Page.navigate", url=url)
        self.wait_for("location.protocol === 'http:' && document.readyState === 'complete'")

    def send(self, method, **params):
        """Returns the answer to a command of the protocol."""
        self._number += 1
        text = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(text).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self, seconds=30.0):
        deadline = time.monotonic() + seconds
        while b"\0" not in self._left:
            ready = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready[0], "the browser does not answer"
            found = os.read(self._answers, 1 << 20)
            assert found, "the browser has ended"
            self._left += found
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def value(self, expression):
        """The value of an expression in JavaScript."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression, seconds=20.0):
        """Waits until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            text = self.value("document.body?.innerText")
            assert time.monotonic() < deadline, f"{expression} is not true:\n{text}"
            time.sleep(0.05)

    def move_to(self, selector):
        """Moves the pointer to the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.value(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return {"x": x, "y": y}

    def click(self, selector):
        at = {**self.move_to(selector), "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **at)

    def drag(self, selector, start, stop):
        """Drags across an element, between two parts of its width."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        left, width, y = self.value(f"(box => [box.x, box.width, box.y + box.height / 2])({box})")
        for kind, part in (
            *(("mouseMoved", start), ("mousePressed", start)),
            *(("mouseMoved", stop), ("mouseReleased", stop)),
        ):
            at = {"x": left + part * width, "y": y, "button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, **at)

    def picture(self, path):
        """Writes a picture of the page, as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser(profile):
    """Starts a browser with an empty profile; yields a page."""
    theirs, commands = os.pipe()
    answers, ours = os.pipe()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    # Chromium reads from 3 and writes to 4.
    shell = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs} 4>&{ours}', FOUND, *options]
    process = subprocess.Popen(
        [*shell, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        pass_fds=(theirs, ours),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
        start_new_session=True,
    )
    os.close(theirs)
    os.close(ours)
    try:
        page = Page(commands, answers)
        yield page
        page.send("Browser.close")
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
