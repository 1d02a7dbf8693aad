"""The installed version of this distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("lamella-engine")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0.0.0"
