"""Chromium without a window, for tests of pages; where it is missing the tests say so and skip themselves."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 90
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
)  # fmt: skip


class Dom(HTMLParser):
    """The elements of a dumped page: by id, and the texts of those with a `data-…` attribute."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.body: dict[str, str | None] = {}
        self.texts: dict[tuple[str, str], str] = {}
        self._open: list[tuple[str, list[tuple[str, str]]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.body = dict(attrs)
        marks = [(name, value or "") for name, value in attrs if name == "id" or name.startswith("data-")]
        for mark in marks:
            self.texts.setdefault(mark, "")
        self._open.append((tag, marks))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, marks in self._open:
            for mark in marks:
                self.texts[mark] += data

    def fields(self, name: str) -> dict[str, str]:
        """Value of the attribute `data-NAME` → text of the element."""
        return {value: text for (mark, value), text in self.texts.items() if mark == f"data-{name}"}

    def by_id(self, name: str) -> str:
        """Text of the element."""
        return self.texts["id", name]


@dataclass(frozen=True)
class Browser:
    """One program; every call is a fresh profile. Raises AssertionError for a page that complains on its console."""

    program: str

    def dom(self, url: str, budget_ms: int = 3000) -> Dom:
        """The page after `budget_ms` of its own time."""
        return Dom(self._run(url, f"--virtual-time-budget={budget_ms}", "--dump-dom"))

    def screenshot(self, url: str, target: Path, size: tuple[int, int], budget_ms: int = 3000) -> bytes:
        """The page as a PNG."""
        window = f"--window-size={size[0]},{size[1]}"
        self._run(url, f"--virtual-time-budget={budget_ms}", window, f"--screenshot={target}")
        return target.read_bytes()

    def _run(self, url: str, *flags: str) -> str:
        with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
            command = [self.program, *FLAGS, f"--user-data-dir={profile}", *flags, url]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not complaints, "\n".join(complaints)
        return done.stdout


def _starts(program: str) -> bool:
    """False for a stub that only tells how to install the real program."""
    return (
        subprocess.run([program, "--version"], capture_output=True, timeout=30, check=False).returncode == 0
    )


def find_browser() -> Browser:
    """The installed Chromium; skips the test, with the reason, where there is none."""
    program = next((found for name in NAMES if (found := shutil.which(name)) and _starts(found)), None)
    if program is None:
        pytest.skip(
            "chromium is not installed (apt-get install chromium); scripts/setup.sh installs it for root"
        )
    return Browser(program)
