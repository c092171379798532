"""A real Chromium for tests of pages.

Needs `chromium` and `chromedriver` (Debian: `apt-get install chromium chromium-driver`). Without them, the tests are
skipped and say so; in CI, which installs them, they fail.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--no-default-browser-check",
]
# For pages that do not move: a page opens in two thirds of the time.
STILL = ["--disable-threaded-compositing", "--disable-lcd-text", "--disable-software-rasterizer"]
PATIENCE_S, COMMAND_S = 120, 300  # drawing takes long if other processes keep all cores busy
DRAWN = "document.documentElement.dataset.drawn !== undefined"  # what a report sets when its plots are there


class Browser:
    """A Chromium that shows one page at a time, and hears what it says and asks for."""

    def __init__(self, profile: Path, *flags: str) -> None:
        options = webdriver.ChromeOptions()
        driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
        if driver is None or chromium is None:  # selenium would download them
            missing = "NOT TESTED IN A BROWSER: install chromium and chromedriver (CONTRIBUTING.md)"
            if os.environ.get("CI"):
                pytest.fail(missing)
            pytest.skip(missing)
        options.binary_location = chromium
        for flag in (*FLAGS, *flags, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        # Otherwise it begins with Chromium's new-tab page, which sends requests of its own.
        options.add_experimental_option(
            "prefs", {"session.restore_on_startup": 4, "session.startup_urls": ["about:blank"]}
        )
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self.driver.command_executor.client_config.timeout = COMMAND_S
        self.driver.set_script_timeout(PATIENCE_S)

    def open(self, page: Path, width: int = 1400, height: int = 900, theme: str = "light", ready: str = DRAWN) -> None:
        self.logs("browser")
        self.logs("performance")
        self.resize(width, height)
        self.theme(theme)
        self._url = page.as_uri()
        self.driver.get(self._url)
        self.wait_for(ready)

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def theme(self, theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def wait_for(self, condition: str) -> None:
        WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05).until(lambda _: self.run(condition))

    def logs(self, kind: str) -> list[dict[str, Any]]:
        logs: list[dict[str, Any]] = self.driver.get_log(kind)
        return logs

    def requests(self) -> list[str]:
        """Return the URLs that were requested since the page was opened, and its own first."""
        messages = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        urls = [params["request"]["url"] for params in sent]
        return urls[urls.index(self._url) :]

    def enter(self, selector: str, text: str) -> None:
        """Give a text field a value at once: typed letter by letter, each letter would draw the page again."""
        self.driver.execute_script(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true}));",
            *(selector, text),
        )

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus goes."""
        webdriver.ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def focused(self) -> str:
        return str(self.run("document.activeElement.id || document.activeElement.outerHTML.slice(0, 90)"))


def contrast_ratio(one: str, other: str) -> float:
    """The contrast of two colours, as in `rgb(1, 2, 3)` (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio)."""

    def luminance(color: str) -> float:
        numbers = [float(each) for each in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in numbers]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
