"""Fixtures shared by all tests of the repository, and the rule that no run on a stale native module passes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent

# Which tests a package's native module serves; those of a package that is not named here: all.
NATIVE_USERS = {
    "specdec": ("packages/specdec/", "packages/engine/", "tests/"),
    "runner-v2": ("packages/runner-v2/", "packages/engine/", "tests/"),
}

# Two cores are shared by test processes and the servers that tests start: libraries must not each take all of them.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# transformers and huggingface_hub must never ask a hub in tests
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's GGUF file, pulled into the user cache folder once."""
    from lamella.engine.models import resolve_model

    return Path(resolve_model("smollm2").path)


def _native_packages() -> list[Any]:
    spec = importlib.util.spec_from_file_location("native", ROOT / "tools" / "native.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return list(tool.native_packages(ROOT))


class NativeState:
    """Prints which native code is tested, and fails a run on modules that are older than their sources.

    The tests themselves still run: most do not touch a module, but what they say of native code is of yesterday's.
    """

    def __init__(self) -> None:
        self.packages = _native_packages()
        self.stale: list[Any] = []

    def pytest_report_header(self) -> list[str]:
        return [f"{n.module}: {n.build_id or 'not built'}{' STALE' if n.stale else ''}" for n in self.packages]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        paths = [f"{item.path.relative_to(ROOT).as_posix()}" for item in session.items]
        for package in self.packages:
            users = NATIVE_USERS.get(package.folder.name, ("",))
            if package.stale and any(path.startswith(users) for path in paths):
                self.stale.append(package)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.stale and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for n in self.stale:
            terminalreporter.write_line(
                f"{n.module} is STALE, this run does not count: built from {n.build_id}, the sources are now "
                f"{n.source_id}; run `hatch run build` and test again",
                red=True,
            )


class Figures:
    """Shows in the summary what tests have measured and given to record_property("figure", text)."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.lines += [str(value) for name, value in report.user_properties if name == "figure"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.lines:
            terminalreporter.section("figures")
            for line in self.lines:
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NativeState(), "native-state")
    config.pluginmanager.register(Figures(), "figures")
