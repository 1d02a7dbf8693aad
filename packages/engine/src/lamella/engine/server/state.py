"""What the handlers of one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lamella.engine.client import EngineClient
from lamella.engine.errors import EngineDeadError, ModelNotFoundError, OverloadedError, RequestError
from lamella.engine.intake import Intake
from lamella.engine.metrics.counters import ServerCounters
from lamella.engine.metrics.prometheus import Exporter
from lamella.engine.server.options import ServerOptions
from lamella.engine.text.chat_template import ChatTemplate
from lamella.engine.text.tokenizer import Tokenizer
from lamella.engine.version import VERSION

T = TypeVar("T")

LONG_TEXT_CHARS = 8192
"""Above it, rendering and tokenising leave the loop, so that streams go on meanwhile."""


class ServerState:
    """Built once the engine has started; `draining` is the only thing that changes."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate, options: ServerOptions
    ) -> None:
        info = client.info
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.options = options
        defaults = options.sampling_defaults
        self.sampling_defaults = info.report.get("sampling defaults", {}) if defaults is None else defaults
        self.vocab_size = info.vocab_size
        self.max_model_len = info.max_model_len
        self.intake = Intake.of_engine(tokenizer, info)
        self.counters = ServerCounters(info.max_model_len)
        self.exporter = Exporter(self.counters, info, options.served_names[0])
        self.fingerprint = f"lamella-{VERSION}"
        self.created = int(time.time())
        self.draining = False
        self.clock = time.monotonic
        client.observers.append(self.counters.on_batch)
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="server-texts")

    def admit(self) -> None:
        """Raise if nothing new may begin: the core is dead, the server drains, or the queue is full."""
        if self.client.dead is not None:
            raise EngineDeadError(f"the engine core ended: {self.client.dead}")
        if self.draining:
            raise OverloadedError("the server shuts down", retry_after_s=5)
        self.client.admit(1)

    def model(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError."""
        if asked is None:
            return self.options.served_names[0]
        if asked not in self.options.served_names:
            names = ", ".join(self.options.served_names)
            raise ModelNotFoundError(f"the model {asked[:100]!r} does not exist; served here: {names}")
        return asked

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run work on texts of that many characters: here if they are short, else on another thread."""
        try:
            if size <= LONG_TEXT_CHARS:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._texts, work)
        except RecursionError:
            raise RequestError("the body is nested too deeply") from None

    def close(self) -> None:
        """End the thread for texts."""
        self._texts.shutdown(wait=False, cancel_futures=True)
