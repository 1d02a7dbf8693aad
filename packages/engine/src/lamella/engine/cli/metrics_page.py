"""A server's /metrics as numbers, for commands that show how it does."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from lamella.engine.errors import StartError
from lamella.engine.metrics.prometheus import PREFIX

TIMEOUT_S = 10.0


class MetricsPage:
    """One scrape. Names are without the prefix; labels other than model and engine select a sample."""

    def __init__(self, text: str) -> None:
        """text: Prometheus' exposition format."""
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    name = sample.name[len(PREFIX) :]
                    self._samples.setdefault(name, []).append((dict(sample.labels), sample.value))

    @classmethod
    def fetch(cls, base_url: str, api_key: str | None = None) -> MetricsPage:
        """Scrape a server. StartError where none answers, or something else does."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            request = urllib.request.Request(base_url.rstrip("/") + "/metrics", headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                page = cls(answer.read().decode())
        except urllib.error.HTTPError as error:
            remedy = "; give --api-key" if error.code in (401, 403) else ""
            raise StartError(f"{base_url} answers /metrics with {error.code}{remedy}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise StartError(f"no server to look at under {base_url}: {reason}") from None
        if not page.has("num_requests_running"):
            raise StartError(f"{base_url} has a /metrics, but not that of a lamella server")
        return page

    def has(self, name: str) -> bool:
        return name in self._samples

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels; 0 if there are none."""
        return sum(value for _, value in self._matching(name, labels))

    def labelled(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Value by one label."""
        found: dict[str, float] = {}
        for given, value in self._matching(name, labels):
            if label in given:
                found[given[label]] = found.get(given[label], 0.0) + value
        return found

    def quantile(self, name: str, share: float) -> float | None:
        """Of a histogram, interpolated within its bucket; None without observations, infinite beyond the last bound."""
        buckets = sorted((float(bound), count) for bound, count in self.labelled(f"{name}_bucket", "le").items())
        if not buckets or not buckets[-1][1]:
            return None
        wanted = share * buckets[-1][1]
        below, low = 0.0, 0.0
        for bound, count in buckets:
            if count >= wanted:
                if math.isinf(bound):
                    return math.inf
                return low + (bound - low) * (wanted - below) / (count - below) if count > below else bound
            below, low = count, bound
        return math.inf

    def _matching(self, name: str, labels: Mapping[str, str]) -> list[tuple[dict[str, str], float]]:
        return [s for s in self._samples.get(name, []) if all(s[0].get(k) == v for k, v in labels.items())]
