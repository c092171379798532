"""Train a small GPT with a fault and take screenshots of its report, for tutorials/report.md.

    python docs/pictures/report.py --train    # also rewrites benchmarks/results/report_run
    python docs/pictures/report.py            # docs/pictures/report-*.png, each in light and dark

Needs chromium and chromedriver, like the tests of the report.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from drawing import HERE, RESULTS

import castwise
from castwise._demo import gpt
from castwise._demo.corpus import Corpus, read_text
from castwise.report import write_report

RUN = RESULTS / "report_run"
BAD_STEP = 120
PLACE = "return document.getElementById(arguments[0]).getBoundingClientRect().toJSON()"
SECTIONS = ("verdict", "timeline", "maps", "exponents", "skips")  # by their ids


def train(folder: Path, size: gpt.Size = gpt.EMULATED, steps: int = 240, every: int = 40) -> None:
    """Train in fp16 with one batch whose loss is not finite, and record to a folder."""
    torch.manual_seed(0)
    corpus = Corpus(read_text(None), size.context)
    model = gpt.GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = castwise.GradScaler("cpu", growth_interval=60)
    with castwise.Monitor(model, optimizer, scaler, every=every, sinks=[folder]):
        for step in range(1, steps + 1):
            tokens, targets = corpus.batch(size, 0, step)
            optimizer.zero_grad()
            with castwise.autocast("cpu", dtype=torch.float16):
                loss = gpt.loss(model(tokens), targets)
                if step == BAD_STEP:
                    loss = loss / torch.zeros(())
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()


def photograph(page: Path, sections: Sequence[str], folder: Path) -> None:
    """Write a screenshot of each section of a page, in light and dark."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium is not installed"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    size = {"width": 1000, "height": 8000, "deviceScaleFactor": 1, "mobile": False}  # the whole page
    try:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for theme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": theme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            driver.get(page.as_uri())
            drawn = "return document.documentElement.dataset.drawn !== undefined"
            WebDriverWait(driver, 60).until(lambda _, drawn=drawn: driver.execute_script(drawn))
            for section in sections:
                place = driver.execute_script(PLACE, section)
                picture = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": {**place, "scale": 1}})
                (folder / f"report-{section}-{theme}.png").write_bytes(base64.b64decode(picture["data"]))
    finally:
        driver.quit()


def main() -> None:
    """Train with --train, then take the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    if parser.parse_args().train:
        warnings.filterwarnings("ignore", message="this CPU has no units")
        shutil.rmtree(RUN, ignore_errors=True)
        train(RUN)
    with tempfile.TemporaryDirectory() as folder:
        page = write_report([RUN], Path(folder) / "report.html")
        photograph(page, SECTIONS, HERE)


if __name__ == "__main__":
    main()
