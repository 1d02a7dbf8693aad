"""From the start of this process to its first token: what benchmarks/gpu.py starts for its start-up row.

    python gpu_start.py SPAWNED FOLDER OPTIONS_JSON

SPAWNED: time.monotonic() of whoever started it, a moment before. Prints one JSON object: seconds since then.
"""

import time

BEGUN = time.monotonic()

import importlib  # noqa: E402 - the clock starts before anything is imported
import json  # noqa: E402
import sys  # noqa: E402


def main(spawned: float, folder: str, options: dict[str, object]) -> None:
    """Import torch, import the engine, load, answer one request."""
    times = {"python": BEGUN - spawned}
    begun = time.monotonic()
    importlib.import_module("torch")
    times["import_torch"] = time.monotonic() - begun
    begun = time.monotonic()
    build = importlib.import_module("lamella.engine.compose.build")
    config = importlib.import_module("lamella.engine.compose.core_config")
    schema = importlib.import_module("lamella.engine.config.schema")
    request = importlib.import_module("lamella.engine.request")
    times["import_engine"] = time.monotonic() - begun
    begun = time.monotonic()
    core = build.build_core(
        config.CoreConfig(options=schema.EngineOptions(model=folder, **options), model_path=folder, progress=False),
        lambda text: print(text, file=sys.stderr),
    )
    times["engine"] = time.monotonic() - begun
    begun = time.monotonic()
    params = request.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    core.submit(request.Request("first", list(range(300, 316)), params, 1, []))
    while True:
        batch = core.run_once()
        if batch is not None and any(delta.token_ids for delta in batch.deltas):
            break
    now = time.monotonic()
    times["first_token"] = now - begun
    print(json.dumps({"value": now - spawned, **{f"{name}_s": seconds for name, seconds in times.items()}}))
    core.close()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
