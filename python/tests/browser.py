"""A headless Chromium, driven over WebDriver: plain HTTP to chromedriver, so that nothing has to be installed
beside the two programs."""

import base64
import http.client
import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# WebDriver's names of keys that are no characters.
KEYS = {
    "left": "\ue012", "up": "\ue013", "right": "\ue014", "down": "\ue015", "home": "\ue011", "end": "\ue010",
    "page up": "\ue00e", "page down": "\ue00f", "tab": "\ue004"}  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
# Seconds that one command may take.
LONGEST = 60


def missing() -> str | None:
    """What of the two programs is not installed, in one sentence."""
    absent = [] if any(map(shutil.which, CHROMIUM)) else ["chromium"]
    absent += [] if shutil.which("chromedriver") else ["chromedriver"]
    if not absent:
        return None
    return f"the page was NOT tested in a browser: no {' and no '.join(absent)} (Debian: chromium, chromium-driver)"


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._session = None
        try:
            self._port = self._started()
            self._session = self._command("POST", "/session", self._wanted(width, height))["sessionId"]
        except BaseException:
            self.close()
            raise

    def _started(self) -> int:
        """The port that the driver chose: it says so when it is ready."""
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                return int(line.rsplit(" ", 1)[1].strip(". \n"))
        raise RuntimeError("chromedriver ended before it listened")

    def _wanted(self, width: int, height: int) -> dict:
        arguments = [
            "--headless=new", f"--window-size={width},{height}", "--disable-gpu", "--disable-dev-shm-usage",
            # A page that asks for anything from outside finds nothing.
            "--host-resolver-rules=MAP * ~NOTFOUND", "--no-first-run", "--disable-background-networking",
        ]  # fmt: skip
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")
        binary = next(filter(None, map(shutil.which, CHROMIUM)))
        return {"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"binary": binary, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }}}  # fmt: skip

    def _command(self, method: str, path: str, body: dict | None = None):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LONGEST)
        where = path if self._session is None else f"/session/{self._session}{path}"
        sent = None if method != "POST" else json.dumps(body or {})
        connection.request(method, where, sent, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())["value"]
        connection.close()
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{method} {path}: {answer['error']}: {answer['message']}")
        return answer

    def close(self) -> None:
        """Ends the window and its driver."""
        try:
            if self._session is not None:
                self._command("DELETE", "")
        finally:
            self._driver.kill()
            self._driver.communicate()

    def open(self, file: Path) -> None:
        """Opens a file from disk; what was logged before is forgotten."""
        self.console(), self.requests()
        self._command("POST", "/url", {"url": file.as_uri()})

    def run(self, script: str, *arguments):
        """What a function body returns in the page."""
        return self._command("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def _element(self, selector: str) -> str:
        found = self._command("POST", "/element", {"using": "css selector", "value": selector})
        return found[ELEMENT]

    def text(self, selector: str) -> str:
        """What a person reads of an element."""
        return self._command("GET", f"/element/{self._element(selector)}/text")

    def click(self, selector: str) -> None:
        """As with a mouse."""
        self._command("POST", f"/element/{self._element(selector)}/click")

    def press(self, selector: str, *keys: str) -> None:
        """Focuses an element and presses keys: names of KEYS, or characters."""
        text = "".join(KEYS.get(key, key) for key in keys)
        self._command("POST", f"/element/{self._element(selector)}/value", {"text": text})

    def point(self, x: float, y: float) -> None:
        """Moves the mouse to a place of the window."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._command("POST", "/actions", {"actions": [mouse]})

    def console(self) -> list[str]:
        """What the page logged since it was asked last: errors, and what its policy refused."""
        found = self._command("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found]

    def requests(self) -> list[str]:
        """Addresses that were asked for since then."""
        entries = self._command("POST", "/se/log", {"type": "performance"})
        sent = [json.loads(entry["message"])["message"] for entry in entries]
        return [one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"]

    def emulate(self, **features: str) -> None:
        """Media features: prefers_color_scheme="dark"."""
        of = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.devtools("Emulation.setEmulatedMedia", features=of)

    def resize(self, width: int, height: int) -> None:
        """The inner size of the window."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def devtools(self, command: str, **parameters):
        """A command of the DevTools protocol."""
        return self._command("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, *, whole: bool = False) -> bytes:
        """A PNG of what is in the window, or of the whole page."""
        found = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def printed(self) -> bytes:
        """A PDF of the page on A4."""
        return base64.b64decode(self._command("POST", "/print", {"page": {"width": 21.0, "height": 29.7}}))
