"""What a streamed token costs the server's process: decoding the core's message, detokenising, encoding the chunk.

    python packages/engine/bench/streaming.py [--streams 16] [--steps 2000]

No socket is involved: the messages are made beforehand, and the chunks go nowhere.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from lamella.engine.cli.report import Report, Row
from lamella.engine.client import EngineClient
from lamella.engine.request import Delta
from lamella.engine.server.chat import ChatAnswer, prepare
from lamella.engine.server.job import Job
from lamella.engine.server.options import ServerOptions
from lamella.engine.server.schema_chat import ChatRequest
from lamella.engine.server.sse import EventStream
from lamella.engine.server.state import ServerState
from lamella.engine.testing.byte_tokenizer import byte_tokenizer
from lamella.engine.testing.fake_link import FakeLink
from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.text.chat_template import ChatTemplate
from lamella.engine.wire import Batch, Stats, ToClient, encoder, to_client

TARGET_US = 20.0
"""Server, client and engine share two cores: at 1000 tokens/s this is 2 % of one."""


class FeedLink(FakeLink):
    """Delivers what it is given."""

    feed: Callable[[ToClient], None]

    def open(self, loop: Any, receive: Callable[[ToClient], None], lost: Callable[[str], None]) -> None:
        self.feed = receive
        super().open(loop, receive, lost)


async def measure(num_streams: int, num_steps: int) -> tuple[float, float]:
    """Microseconds of CPU per token, and bytes per chunk."""
    core = ScriptedCore()
    core.info = msgspec.structs.replace(core.info, max_model_len=1 << 20)
    link = FeedLink(core, automatic=False)
    client = EngineClient(link)
    await client.start()
    tokenizer = byte_tokenizer()
    state = ServerState(client, tokenizer, ChatTemplate(tokenizer), ServerOptions(served_names=("bench",)))
    num_bytes = 0

    async def send(message: Any) -> None:
        nonlocal num_bytes
        num_bytes += len(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    streams, ids = [], []
    for _ in range(num_streams):
        body = ChatRequest(messages=[{"role": "user", "content": "hello"}], stream=True)
        request = prepare(state, body)
        job = Job(state, [request], state.clock())
        stream = EventStream(job, ChatAnswer(state, job, body, "bench"), {})
        streams.append(asyncio.create_task(stream({"type": "http"}, receive, send)))
        ids.append(request.request_id)
    await asyncio.sleep(0)
    frame = encoder.encode(Batch([Delta(request_id, 0, [104]) for request_id in ids], Stats()))
    begun_s = time.process_time()
    for _ in range(num_steps):
        link.feed(to_client.decode(frame))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    spent_s = time.process_time() - begun_s
    link.feed(Batch([Delta(request_id, 0, [], "length") for request_id in ids]))
    await asyncio.gather(*streams)
    state.close()
    await client.close()
    return spent_s / num_steps / num_streams * 1e6, num_bytes / num_steps / num_streams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args()
    cost_us, chunk_bytes = asyncio.run(measure(args.streams, args.steps))
    if args.json:
        name = f"CPU per streamed token, {args.streams} streams"
        target = f"<= {TARGET_US:.0f} us"
        Report.of([Row(name=name, value=cost_us, unit="us", target=target, ok=cost_us <= TARGET_US)]).write(args.json)
    verdict = "ok" if cost_us <= TARGET_US else "too slow"
    print(f"{cost_us:.1f} us per streamed token (target {TARGET_US:.0f}: {verdict}), {chunk_bytes:.0f} bytes per chunk")


if __name__ == "__main__":
    main()
