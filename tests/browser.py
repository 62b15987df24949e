"""A headless Chromium, driven through chromedriver's W3C HTTP protocol."""

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

_SECONDS = 60


class Browser:
    """One window. `session` is the address of its session at the driver."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        """Returns when the page and what it waits for have loaded."""
        self._post("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body of JavaScript returns."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any) -> Any:
        """What a body of JavaScript gives to its callback, `done`."""
        body = f"const done = arguments[arguments.length - 1]; {script}"
        return self._post("execute/async", {"script": body, "args": list(arguments)})

    def drag(self, *path: tuple[float, float]) -> None:
        """Press the mouse at the first place of the window, in pixels, and let it go at the last."""
        first, *rest = ({"type": "pointerMove", "duration": 50, "x": round(x), "y": round(y)} for x, y in path)
        button = {"button": 0}
        self._act([first, {"type": "pointerDown", **button}, *rest, {"type": "pointerUp", **button}])

    def move(self, x: float, y: float) -> None:
        self._act([{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}])

    def double_click(self, x: float, y: float) -> None:
        click = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._act([{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}, *click, *click])

    def log(self, kind: Literal["browser", "performance"]) -> list[dict[str, Any]]:
        """What the console (`browser`) or the network (`performance`) has said since the last call."""
        return self._post("se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Every address that the page has asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def _act(self, actions: Sequence[dict[str, Any]]) -> None:
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._post("actions", {"actions": [pointer]})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call(f"{self._session}/{path}", body)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose own files go to `folder`; the test is skipped where none is installed."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        missing = " and ".join(
            package for package, found in (("chromium", chromium), ("chromium-driver", driver)) if found is None
        )
        pytest.skip(f"needs a browser: install Debian's packages {missing}")
    log = folder / "chromedriver.log"
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"]
    arguments += [f"--user-data-dir={folder / 'profile'}", "--window-size=1300,1000", "--no-first-run"]
    arguments += ["--disable-background-networking", "--disable-component-update"]
    options = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": chromium, "args": arguments},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    with (
        log.open("w") as output,
        subprocess.Popen(
            [driver, "--port=0"],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            # Chromium leaves files in the folder for temporary ones.
            env={**os.environ, "TMPDIR": str(folder)},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            address = next(
                f"http://127.0.0.1:{match[1]}"
                for line in process.stdout
                if (match := re.search(r"started successfully on port (\d+)", line))
            )
            created = _call(f"{address}/session", {"capabilities": {"alwaysMatch": options}})
            session = f"{address}/session/{created['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _call(session, None)
        finally:
            process.terminate()


def _call(url: str, body: dict[str, Any] | None) -> Any:
    """POST `body`; or DELETE, where it is None. Raises HTTPError with the driver's message."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method="DELETE" if body is None else "POST")
    try:
        # No proxy: the driver is on this machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_SECONDS) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.read().decode(errors='replace')[:2000]}") from error
