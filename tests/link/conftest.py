"""Prints what tests of links have recorded, after the last one, also if they ran side by side."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "link":
                    terminalreporter.write_line(str(value))
