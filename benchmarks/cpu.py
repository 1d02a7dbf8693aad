"""lamella beside its peers on the demo model, on this CPU, in one run: only the ratios mean anything.

  hatch run bench cpu                              all sections
  hatch run bench cpu --only decode,prefill        some of: decode, prefill, overhead, sampling, server
  hatch run bench cpu --json benchmarks/results/cpu.json --plot cpu.png

Prompt 512 tokens, 32 new ones, logits of the last row only, the same threads for all. Engines take turns for several
rounds; the best round of each counts, since other work on the machine only ever slows a run (of the server's rounds the
median: there two processes are compared that share the machine). llama.cpp takes part if
llama-cpp-python is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import peers

import lamella.engine as lamella
from lamella.engine.cli.bench_latency import random_prompts
from lamella.engine.cli.report import Report, Row, merge_rows, plot_bars
from lamella.engine.models import resolve_model

ROOT = Path(__file__).resolve().parent.parent
PROMPT_LEN, NUM_NEW, VOCAB = 512, 32, 49152
SERVER_ROUNDS = 3
SECTIONS = ("decode", "prefill", "overhead", "sampling", "server")


def main() -> int:
    """Run the sections and print the table; exit code 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", metavar="FILE", help="write the rows; rows of sections that did not run are kept")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}")
    path = Path(resolve_model("smollm2").path)
    rows: list[Row] = []
    if "decode" in wanted or "prefill" in wanted:
        rows += model_rows(path, args.threads, args.rounds, wanted)
    if "overhead" in wanted:
        rows += script_rows(ROOT / "packages/engine/bench/scheduler_overhead.py")
    if "sampling" in wanted:
        rows += script_rows(ROOT / "packages/runner-v2/bench/sampling.py")
    if "server" in wanted:
        rows += server_rows(path, args.threads)
    report = Report.of(rows)
    print(report.table())
    if args.json:
        merge_rows(args.json, report).write(args.json)
    if args.plot:
        plot_bars(args.plot, "lamella on this CPU", rows)
    return 0 if all(row.ok is not False for row in rows) else 1


def prompts(rng: random.Random, batch: int) -> list[list[int]]:
    """Prompts that share no prefix."""
    return [[rng.randrange(300, VOCAB) for _ in range(PROMPT_LEN)] for _ in range(batch)]


def model_rows(path: Path, threads: int, rounds: int, wanted: Sequence[str]) -> list[Row]:
    """Decode at batch 1 and 8, and prefill, each beside the peers."""
    length = PROMPT_LEN + NUM_NEW
    makers: dict[int, list[Callable[[], peers.Peer]]] = {
        1: [
            lambda: peers.Lamella(path, threads, 1, length),
            lambda: peers.Transformers(path, threads, "bfloat16"),
        ],
        8: [
            lambda: peers.Lamella(path, threads, 8, length),
            lambda: peers.Transformers(path, threads, "bfloat16"),
        ],
    }
    if peers.have_llama_cpp():
        makers[1].append(lambda: peers.LlamaCpp(path, threads, length))
    else:
        print("llama-cpp-python is not installed: its rows are left out", file=sys.stderr)
    rng = random.Random(0)
    rows = []
    for batch, made in makers.items():
        engines = [make() for make in made]
        best = {engine.name: [float("inf"), float("inf")] for engine in engines}
        for round_idx in range(rounds if batch == 1 else 3):
            ids = prompts(rng, batch)
            for engine in engines:
                if batch > 1 and round_idx > 1 and engine.name != "lamella":
                    continue  # one round of a slow peer behind its warm-up is enough: it takes minutes
                prefill, decode = engine.run(ids, NUM_NEW)
                if round_idx == 0:
                    continue  # warm-up: pages are touched, pools are filled
                figures = best[engine.name]
                figures[0], figures[1] = min(figures[0], prefill), min(figures[1], decode)
        for engine in engines:
            engine.close()
        speeds = {
            name: (batch * PROMPT_LEN / prefill, batch * (NUM_NEW - 1) / decode)
            for name, (prefill, decode) in best.items()
        }
        if "prefill" in wanted:
            rows += compare(f"prefill, batch {batch}", {n: s[0] for n, s in speeds.items()}, {"transformers bf16": 1.0})
        if "decode" in wanted:
            targets = {"llama.cpp": 1.0} if batch == 1 else {"transformers bf16": 4.0}
            rows += compare(f"decode, batch {batch}", {n: s[1] for n, s in speeds.items()}, targets)
    return rows


def compare(what: str, speeds: dict[str, float], targets: dict[str, float]) -> list[Row]:
    """A row of ours against each peer."""
    ours = speeds["lamella"]
    rows = []
    for peer, speed in speeds.items():
        if peer == "lamella":
            continue
        target = targets.get(peer)
        rows.append(
            Row(
                name=f"{what}, beside {peer}",
                value=ours,
                unit="tokens/s",
                peer=peer,
                ratio=ours / speed,
                target=f">= {target:g} x {peer}" if target else None,
                ok=ours / speed >= target if target else None,
            )
        )
    return rows


def script_rows(script: Path) -> list[Row]:
    """Rows of another bench, run in a process of its own."""
    file = out_folder() / f"{script.stem}.json"
    subprocess.run(
        [sys.executable, str(script), "--json", str(file)], check=True, stdout=subprocess.DEVNULL, timeout=300
    )
    return [Row(**row) for row in json.loads(file.read_text())["rows"]]


def out_folder() -> Path:
    """Where reports of parts lie; ignored by git."""
    folder = ROOT / "benchmarks" / "out"
    folder.mkdir(exist_ok=True)
    return folder


def server_rows(path: Path, threads: int) -> list[Row]:
    """Requests through the server, 16 at once, against the same requests offline.

    Both engines have the same settings and get the same prompts, without a prefix cache that would know them. They take
    turns, and a ratio is that of one round: what else the machine does falls on both. The median of the rounds counts.
    """
    clients, length_in, length_out = 16, 128, 64
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lamella.engine.cli.main"]
    settings = {"threads": threads, "max_num_seqs": clients, "max_num_batched_tokens": 1024, "max_model_len": 512}
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    server = subprocess.Popen(
        [*command, "serve", str(path), "--port", str(port), "--no-enable-prefix-caching", "--no-log-stats", *words],
        stdout=subprocess.DEVNULL,
    )
    speeds: dict[str, list[float]] = {"offline": [], "not streaming": [], "streaming": []}
    client_cpu: dict[str, list[float]] = {"not streaming": [], "streaming": []}
    try:
        with lamella.LLM(str(path), enable_prefix_caching=False, **settings) as llm:
            wait_until_up(port, server)
            for seed in range(SERVER_ROUNDS + 1):
                count = 2 * clients if seed else clients  # the first round warms up
                work = random_prompts(random.Random(seed), count, length_in, 1024)  # those of the load client
                found = {"offline": {"output tokens": offline_speed(llm, work, length_out)}}
                for kind in client_cpu:
                    found[kind] = run_load(
                        command, port, count, clients, length_in, length_out, kind == "streaming", seed
                    )
                if seed:
                    for kind, values in found.items():
                        speeds[kind].append(values["output tokens"])
                    for kind, shares in client_cpu.items():
                        shares.append(found[kind]["client CPU"])
    finally:
        server.terminate()
        server.wait(30)
    rows = []
    for kind, target in (("not streaming", 0.90), ("streaming", 0.75)):
        ratio = statistics.median(ours / offline for ours, offline in zip(speeds[kind], speeds["offline"]))
        rows.append(
            Row(
                name=f"server, {clients} clients, {kind}",
                value=statistics.median(speeds[kind]),
                unit="tokens/s",
                peer="offline",
                ratio=ratio,
                target=f">= {target:.2f} x offline",
                ok=ratio >= target,
            )
        )
        rows.append(Row(name=f"client CPU, {kind}", value=statistics.median(client_cpu[kind]), unit="% of a core"))
    return rows


def offline_speed(llm: lamella.LLM, work: list[list[int]], length_out: int) -> float:
    """Output tokens per second."""
    params = lamella.SamplingParams(temperature=0.0, max_tokens=length_out, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(work, params)
    return len(work) * length_out / (time.perf_counter() - start)


def run_load(
    command: list[str], port: int, count: int, clients: int, length_in: int, length_out: int, stream: bool, seed: int
) -> dict[str, float]:
    """One `lamella bench serve` in a process of its own: name -> value."""
    file = out_folder() / "serve.json"
    subprocess.run(
        [*command, "bench", "serve", "--base-url", f"http://127.0.0.1:{port}", "--num-prompts", str(count)]
        + ["--max-concurrency", str(clients), "--input-len", str(length_in), "--output-len", str(length_out)]
        + ["--seed", str(seed), "--stream" if stream else "--no-stream", "--json", str(file)],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=300,
    )
    return {row["name"]: row["value"] for row in json.loads(file.read_text())["rows"]}


def wait_until_up(port: int, server: subprocess.Popen[bytes]) -> None:
    """Return when the port answers; raises if the server ended or a minute has gone by."""
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError("the server did not come up in a minute")


if __name__ == "__main__":
    sys.exit(main())
