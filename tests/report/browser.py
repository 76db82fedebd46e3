"""Real headless Chromium over its debugging pipe (file descriptors 3 and 4): no driver, no socket, no dependency."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser; what the console and the policy say is kept."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scalepoint-chromium-")
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        for handle in (read, write):
            os.set_inheritable(handle, True)
        # HOME and the profile are the browser's own, so that nothing of the user's is read or written
        environment = {**os.environ, "HOME": self._folder.name, "XDG_CONFIG_HOME": self._folder.name}
        starter = [sys.executable, "-c", START, str(read), str(write)]
        self._process = subprocess.Popen(
            [*starter, program, *FLAGS, f"--user-data-dir={self._folder.name}/profile", "about:blank"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        os.close(read)
        os.close(write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self._responses: dict[int, dict[str, Any]] = {}
        pages = [
            targetInfo for targetInfo in self.call("Target.getTargets")["targetInfos"] if targetInfo["type"] == "page"
        ]
        target = pages[0]["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while number not in self._responses:
            self._receive(deadline, method)
        answer = self._responses.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self, deadline: float, what: str) -> None:
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0 or not select.select([self._read], [], [], remaining_seconds)[0]:
            raise TimeoutError(f"no answer to {what} within {SECONDS} s")
        data = os.read(self._read, 1 << 20)
        if not data:
            raise RuntimeError(f"the browser ended during {what}")
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._responses[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, data: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = data["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded":
            self.complaints.append(data["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{data['type']}: {data['args']}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {data['message']}")
        elif method == "Network.requestWillBeSent" and not data["request"]["url"].startswith(("file:", "about:")):
            self.complaints.append(f"a request: {data['request']['url'][:200]}")

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Load a file and wait until it is all there."""
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=scheme)
        self.call("Page.navigate", url="about:blank")
        self.complaints.clear()
        address = path.resolve().as_uri()
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + SECONDS
        while self.run("[document.URL, document.readyState]") != [address, "complete"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} did not load within {SECONDS} s")
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; also when the page itself may run no script."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A real key: Tab or Enter."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, full_page: bool = True) -> None:
        answer = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=full_page, **self._clip(full_page)
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self, full_page: bool) -> dict[str, Any]:
        if not full_page:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        for _ in range(20):  # its helpers may still be writing into the profile
            try:
                self._folder.cleanup()
                return
            except OSError:
                time.sleep(0.1)
