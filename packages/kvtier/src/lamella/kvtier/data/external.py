"""External managers: found by module path, and kept where they can do no harm.

driver's thread ──call──▶ IsolatedManager ──▶ the manager's own thread ──▶ the user's object
                               │ time-out: the thread is left to itself and a new one, with a new object,
                               │ takes its place; that happens max_restarts times at most
                               └ failure: CallFailed(kind), counted by kind
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from lamella.kvtier.errors import ExternalManagerError
from lamella.kvtier.protocols import ExternalManager

METHODS = ("lookup", "load", "store", "close")


def manager_maker(module_path: str, options: Mapping[str, Any] | None = None) -> Callable[[], ExternalManager]:
    """What makes the managers that `package.module:Class` names, with the options as keywords.

    Raises ExternalManagerError when there is no such class, or it lacks a method. Nothing is made yet.
    """
    module_name, colon, class_name = module_path.partition(":")
    if not (module_name and colon and class_name):
        raise ExternalManagerError(
            f"external manager {module_path!r}: name it as package.module:Class, for example my_store.kv:Manager"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ExternalManagerError(
            f"external manager {module_path!r}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}); install it, or put its folder on PYTHONPATH"
        ) from error
    made = getattr(module, class_name, None)
    if not callable(made):
        raise ExternalManagerError(
            f"external manager {module_path!r}: module {module_name!r} has no class {class_name!r}; "
            f"it has {', '.join(_classes(module)) or 'no classes'}"
        )
    missing = [method for method in METHODS if isinstance(made, type) and not callable(getattr(made, method, None))]
    if missing:
        raise ExternalManagerError(
            f"external manager {module_path!r}: class {class_name!r} lacks {', '.join(missing)}; "
            "see lamella.kvtier.protocols.ExternalManager"
        )

    def make() -> ExternalManager:
        try:
            manager: ExternalManager = made(**dict(options or {}))
        except Exception as error:
            raise ExternalManagerError(
                f"external manager {module_path!r} cannot be made with {dict(options or {})}: "
                f"{type(error).__name__}: {error}; mend the options behind its name"
            ) from error
        return manager

    return make


class CallFailed(Exception):
    """A call that gave no answer of use. kind: timeout, raised, exited, gone, closed, answer."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class _Call:
    """One call on its way to the manager's thread and back."""

    __slots__ = ("arguments", "done", "failure", "method", "result")

    def __init__(self, method: str, arguments: tuple[Any, ...]) -> None:
        self.method = method
        self.arguments = arguments
        self.done = threading.Event()
        self.result: Any = None
        self.failure: CallFailed | None = None


class IsolatedManager:
    """Calls a manager with a limit of time. One caller at a time."""

    def __init__(
        self, make: Callable[[], ExternalManager], *, timeout_s: float = 5.0, max_restarts: int = 3, name: str = ""
    ) -> None:
        """make is called on the manager's thread, and again for every thread that takes the place of one that hangs."""
        self.failures: Counter[str] = Counter()
        self.num_restarts = 0
        self._make = make
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        self._name = name
        self._calls: SimpleQueue[_Call | None] | None = None
        self._current: _Call | None = None
        self._aborted = False

    @property
    def gone(self) -> bool:
        """Whether its threads hung so often that it is not called any more."""
        return self.num_restarts > self._max_restarts

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of the manager's method, whatever it is. Raises CallFailed."""
        if self.gone:
            raise CallFailed("gone", f"hung {self.num_restarts} times")
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(
                target=_serve, args=(self._make, self._calls), name=f"kvtier-external-{self._name}", daemon=True
            ).start()
        call = self._current = _Call(method, arguments)
        if self._aborted:
            raise CallFailed("closed", f"{method} was not called")
        self._calls.put(call)
        if not call.done.wait(self._timeout_s):
            self._calls.put(None)  # should it ever come back, it ends
            self._calls = None
            self.num_restarts += 1
            self.failures["timeout"] += 1
            raise CallFailed("timeout", f"{method} took more than {self._timeout_s:g} s")
        if self._aborted and call.failure is None:
            raise CallFailed("closed", f"{method} was given up")
        if call.failure is not None:
            self.failures[call.failure.kind] += 1
            raise call.failure
        return call.result

    def abort(self) -> None:
        """From another thread: the call that runs, and every later one, fails at once."""
        self._aborted = True
        call = self._current
        if call is not None:
            call.done.set()

    def close(self) -> None:
        """Tell the manager that no call comes later; a manager that hangs is left to itself."""
        if self._calls is None:
            return
        call = _Call("close", ())
        self._calls.put(call)
        self._calls.put(None)
        self._calls = None
        if not self._aborted:
            call.done.wait(min(self._timeout_s, 2.0))


def _serve(make: Callable[[], ExternalManager], calls: SimpleQueue[_Call | None]) -> None:
    """The manager's thread. A manager that cannot be made is tried again at the next call."""
    manager: ExternalManager | None = None
    while (call := calls.get()) is not None:
        try:
            if manager is None and call.method != "close":
                manager = make()
            if manager is not None:
                call.result = getattr(manager, call.method)(*call.arguments)
        except Exception as error:  # noqa: BLE001  users' code: whatever it raises is its failure, not ours
            call.failure = CallFailed("raised", f"{call.method}: {type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001  so is sys.exit()
            call.failure = CallFailed("exited", f"{call.method}: {type(error).__name__}: {error}")
        call.done.set()


def _classes(module: Any) -> list[str]:
    return sorted(name for name, value in vars(module).items() if isinstance(value, type) and name[0] != "_")
