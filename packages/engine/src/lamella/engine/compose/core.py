"""The core process: `python -m lamella.engine.compose.core`, started by links.process.ProcessLink.

    standard input ─ start message ─► build the core ─► CoreLoop on the main thread
                   └ end of file  ─► the client is gone: end
    input thread    PULL ─► decode ─► inbox
    output thread   outbox ─► encode ─► PUSH (links/outbox.py)

SIGTERM drains: what runs may finish, new requests are refused. SIGINT is the client's business. Whatever else ends the
core is told in a last Dead message, and the exit code is not 0. On SIGUSR1 the stacks of all threads go to standard
error, whatever the threads are doing.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import zmq

from lamella.engine.core_loop import Core, CoreCrash, CoreLoop, Inbox
from lamella.engine.errors import EngineError
from lamella.engine.links.outbox import Outbox
from lamella.engine.links.process import CoreStart
from lamella.engine.wire import Dead, Progress, ToClient, to_core

EXIT_GRACE_S = 5.0
"""What the core gets to end by itself once its client is gone."""

LINGER_S = 2.0
"""What a core that has been drained waits for its client to end it. A signal may go to both, and the client should not
see its core vanish before it has read its own."""

log = logging.getLogger("lamella.core")


def main() -> int:
    """Run the core of the start message on standard input; returns the exit code."""
    gc.disable()  # what is imported and built stays: collecting meanwhile walks it again and again
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = read_start()
    if start is None:
        return 1
    logging.basicConfig(stream=sys.stderr, level=start.log_level, format="%(asctime)s %(name)s %(message)s")
    inbox = Inbox()

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        inbox.drain()

    signal.signal(signal.SIGTERM, terminate)
    threading.excepthook = thread_died
    outbox = Outbox(start.to_client)
    running, client_gone = threading.Event(), threading.Event()
    watch = (inbox, outbox, running, client_gone)
    threading.Thread(target=watch_client, args=watch, name="core-parent", daemon=True).start()
    try:
        receive(start.to_core, inbox)
        core = build(start, outbox.put)
        if core is None:
            return 1
        gc.collect()
        gc.freeze()
        gc.enable()
        running.set()
        CoreLoop(core, inbox, outbox.put, linger_s=LINGER_S).run()
    except CoreCrash:
        log.exception("the engine core crashed")
        return 1
    except zmq.ZMQError as error:  # the folder of the sockets is gone, and most likely the client with it
        outbox.put(Dead(f"cannot listen to the client: {error}"))
        return 1
    finally:
        if not client_gone.is_set():
            outbox.close()
    return 0


def read_start() -> CoreStart | None:
    """The start message; None if the client went away before it."""
    stdin = sys.stdin.buffer
    head = stdin.read(4)
    body = stdin.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    return msgspec.msgpack.decode(body, type=CoreStart) if body else None


def build(start: CoreStart, emit: Callable[[ToClient], None]) -> Core | None:
    """Call the factory; None if it cannot, which has then been told."""
    module, _, function = start.factory.partition(":")
    try:
        factory: Callable[[Any, Callable[[str], None]], Core] = getattr(importlib.import_module(module), function)
        return factory(start.config, lambda text: emit(Progress(text)))
    except Exception as error:
        # a user's mistake is one line; anything else needs its traceback
        expected = isinstance(error, (EngineError, OSError)) or type(error).__module__.startswith("lamella.")
        if not expected:
            log.exception("the engine core could not start")
        emit(Dead(str(error) if expected else f"{type(error).__name__}: {error}"))
        return None


def watch_client(inbox: Inbox, outbox: Outbox, running: threading.Event, client_gone: threading.Event) -> None:
    """Wait for the end of standard input; then end the loop, or the process if no loop runs or it does not end."""
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    if not running.is_set():
        os._exit(1)  # nothing but a model that is being loaded is lost
    client_gone.set()
    inbox.close()
    outbox.abandon()
    threading.Event().wait(EXIT_GRACE_S)
    os._exit(1)


def thread_died(args: threading.ExceptHookArgs) -> None:
    """A core without its input or output thread would hang unseen: end the process instead."""
    log.error("thread %s of the engine core failed", args.thread and args.thread.name, exc_info=args.exc_value)
    os._exit(1)


def receive(address: str, inbox: Inbox) -> None:
    """Bind the incoming socket, and start the thread that fills the inbox."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)

    def run() -> None:
        while True:
            frame = socket.recv()
            try:
                inbox.put(to_core.decode(frame))
            except msgspec.DecodeError:  # the fault of one message, and the others are in the same core
                log.exception("a message of %d bytes cannot be read and is dropped", len(frame))

    threading.Thread(target=run, name="core-input", daemon=True).start()


if __name__ == "__main__":
    code = main()
    # threads of libraries must not hold up the end; what counts has been flushed
    sys.stderr.flush()
    os._exit(code)
