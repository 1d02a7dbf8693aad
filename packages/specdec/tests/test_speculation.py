"""Whole configs: several drafters, rules by name, and what cannot go together."""

from __future__ import annotations

import json
import re

import pytest

from lamella.specdec import ArbitraryConfig, ConfigError, NgramConfig, Speculation, SuffixConfig, parse_speculation
from lamella.specdec.rules import STANDARD, Relaxed, Synthetic, Threshold, Typical
from lamella.specdec.speculation import RULE_KEYS

SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
ARBITRARY = {"method": "arbitrary", "num_speculative_tokens": 3}
RULE = "rejection_sample_method"


def test_one_drafter_is_kept_by_the_standard_rule():
    parsed = parse_speculation(json.dumps(NGRAM))
    assert parsed == Speculation((NgramConfig(4),), STANDARD, adaptive=True)
    assert (parsed.methods, parsed.num_speculative_tokens) == (("ngram",), 4)
    assert parse_speculation({**NGRAM, RULE: "standard"}).rule == STANDARD
    assert not parse_speculation({**NGRAM, "enable_adaptive_verification": False}).adaptive


def test_fallbacks_follow_in_order_each_with_keys_of_its_own():
    chain = {**SUFFIX, "fallback": {**NGRAM, "num_speculative_tokens": 9, "fallback": {**ARBITRARY, "fallback": None}}}
    parsed = parse_speculation(chain)
    assert parsed.drafters == (SuffixConfig(8), NgramConfig(9), ArbitraryConfig(3))
    assert parsed.methods == ("suffix", "ngram", "arbitrary")
    assert parsed.num_speculative_tokens == 9


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({RULE: "synthetic", "synthetic_acceptance_rates": [0.8, 0.64, 0]}, Synthetic((0.8, 0.64, 0.0))),
        ({RULE: "synthetic", "synthetic_acceptance_length": 2.5}, Synthetic((1.0, 0.5, 0.0))),
        ({RULE: "typical"}, Typical(0.09, 0.3)),
        ({RULE: "typical", "posterior_threshold": 0.5, "posterior_alpha": 1}, Typical(0.5, 1.0)),
        ({RULE: "relaxed", "relaxed_topk": 4, "relaxed_delta": 0.5}, Relaxed(4, 0.5)),
        ({RULE: "threshold", "accept_threshold_acc": 0.5}, Threshold(1.0, 0.5)),
        ({RULE: "threshold", "accept_threshold_single": 0.25}, Threshold(0.25, 1.0)),
    ],
)
def test_rules_by_name(options, rule):
    parsed = parse_speculation({**ARBITRARY, **options})
    assert parsed.rule == rule
    assert not parsed.rule.exact
    assert parsed.rule.name == options[RULE]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({RULE: "block"}, "rejection_sample_method is 'block', drafts that are chosen"),
        ({RULE: "fly"}, "rejection_sample_method is 'fly', it is not supported"),
        ({RULE: "typcial"}, "'typcial', there is no such rule; supported: \"standard\""),
        ({RULE: 3}, "rejection_sample_method is 3, it must be a name"),
        ({RULE: "synthetic"}, "needs either synthetic_acceptance_rates or synthetic_acceptance_length"),
        (
            {RULE: "synthetic", "synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 2},
            "synthetic_acceptance_length, not both",
        ),
        ({RULE: "synthetic", "synthetic_acceptance_rates": [0.8]}, "must be a list of 3 numbers, one for each draft"),
        ({RULE: "synthetic", "synthetic_acceptance_rates": 0.8}, "must be a list of 3 numbers"),
        (
            {RULE: "synthetic", "synthetic_acceptance_rates": [0.8, 0.9, 0]},
            "synthetic_acceptance_rates[1] must be in [0, 0.8], got 0.9",
        ),
        (
            {RULE: "synthetic", "synthetic_acceptance_rates": [0.8, "x", 0]},
            "synthetic_acceptance_rates[1] must be a number, got 'x'",
        ),
        ({RULE: "synthetic", "synthetic_acceptance_length": 4.5}, "must be in [1, 4] with 3 drafts, got 4.5"),
        (
            {"synthetic_acceptance_length": 2},
            '\'synthetic_acceptance_length\' belongs to rejection_sample_method "synthetic", which is "standard"',
        ),
        ({RULE: "typical", "relaxed_topk": 2}, "'relaxed_topk' belongs to rejection_sample_method \"relaxed\""),
        ({RULE: "typical", "posterior_alpha": 0}, "posterior_alpha must be in (0, 1], got 0"),
        ({RULE: "relaxed", "relaxed_topk": 2}, "relaxed_delta is missing"),
        ({RULE: "relaxed", "relaxed_topk": 1, "relaxed_delta": 1}, "relaxed_topk must be in [2, 1024], got 1"),
        ({RULE: "relaxed", "relaxed_topk": 2.0, "relaxed_delta": 1}, "relaxed_topk must be an integer"),
        ({RULE: "relaxed", "relaxed_topk": 2, "relaxed_delta": 0}, "relaxed_delta must be in (0, 1000.0], got 0"),
        ({RULE: "threshold"}, "are both 1, which is the standard rule"),
        ({"fallback": [NGRAM]}, "fallback must be an object as the whole config is"),
        ({"fallback": {"method": "ngram"}}, "fallback: num_speculative_tokens is missing"),
        ({"fallback": {**NGRAM, "surprise": 1}}, "fallback: unknown key 'surprise'"),
        ({"fallback": {**NGRAM, "fallback": {"method": "eagle"}}}, "fallback: fallback: method is 'eagle'"),
        ({"fallback": ARBITRARY}, 'method "arbitrary" is named more than once'),
        ({"fallback": {**NGRAM, RULE: "typical"}}, "fallback: 'rejection_sample_method' holds for all drafters"),
        (
            {"fallback": {**NGRAM, "enable_adaptive_verification": True}},
            "fallback: 'enable_adaptive_verification' holds for all drafters",
        ),
    ],
)
def test_mistakes_are_named(options, said):
    with pytest.raises(ConfigError, match="^speculative config: .*" + re.escape(said)):
        parse_speculation({**ARBITRARY, **options})


@pytest.mark.parametrize("key", RULE_KEYS)
def test_no_key_of_a_rule_is_passed_over(key):
    with pytest.raises(ConfigError, match=key):
        parse_speculation({**NGRAM, key: "telepathy"})
