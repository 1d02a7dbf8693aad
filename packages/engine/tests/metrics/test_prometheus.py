"""What a scrape of a server shows, read by Prometheus' own parser."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lamella.engine.testing.scripted_core import ScriptedCore
from lamella.engine.testing.server_thread import MODEL, serve


def scrape(http: httpx.Client) -> dict[str, float]:
    """Sample name and labels (without model and engine) -> value."""
    samples = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("lamella:"):
                assert labels.pop("model_name") == MODEL
                assert labels.pop("engine") == "0"
            told = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            samples[f"{sample.name}{{{told}}}"] = sample.value
    return samples


def test_a_scrape_after_requests() -> None:
    with serve(ScriptedCore()) as server, httpx.Client(base_url=server.url) as http:
        idle = scrape(http)
        assert idle["lamella:generation_tokens_total{}"] == 0
        body = {"prompt": "say:abc", "max_tokens": 50, "n": 2}
        for stream in (False, True):
            assert http.post("/v1/completions", json={**body, "stream": stream}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "say:abcdef", "max_tokens": 2}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": 5}).status_code == 400
        samples = scrape(http)
    assert samples["lamella:generation_tokens_total{}"] == 4 * 4 + 2
    assert samples["lamella:request_success_total{finished_reason=stop}"] == 4
    assert samples["lamella:request_success_total{finished_reason=length}"] == 1
    assert samples["lamella:request_success_total{finished_reason=abort}"] == 0
    assert samples["lamella:time_to_first_token_seconds_count{}"] == 5
    assert samples["lamella:e2e_request_latency_seconds_count{}"] == 5
    assert samples["lamella:request_queue_time_seconds_sum{}"] == 0.005
    assert samples["lamella:request_generation_tokens_sum{}"] == 18
    assert samples["lamella:request_generation_tokens_bucket{le=2.0}"] == 1
    assert samples["lamella:request_params_n_sum{}"] == 5
    assert samples["lamella:request_prompt_tokens_count{}"] == 3
    assert samples["lamella:prompt_tokens_cached_total{}"] == 3 + 3 + 5
    assert samples["lamella:num_requests_running{}"] == 0
    assert samples["lamella:iteration_tokens_total_sum{}"] == 18 + samples["lamella:prompt_tokens_computed_total{}"]
    assert samples["lamella:prompt_tokens_computed_total{}"] == 4 * (7 - 3) + (10 - 5)
    assert samples["lamella:prompt_tokens_total{}"] == 4 * 7 + 10
    assert samples["lamella:http_requests_total{handler=/v1/completions,method=POST,status=200}"] == 3
    assert samples["lamella:http_requests_total{handler=/v1/completions,method=POST,status=400}"] == 1
    cache = "block_size=16,kv_tokens=1024,max_model_len=512,max_num_seqs=8,num_blocks=64"
    assert samples[f"lamella:cache_config_info{{{cache}}}"] == 1
    assert "process_cpu_seconds_total{}" in samples
