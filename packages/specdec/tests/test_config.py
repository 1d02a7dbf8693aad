from __future__ import annotations

import json

import pytest

from lamella.specdec import ArbitraryConfig, ConfigError, NgramConfig, SuffixConfig, parse_speculative_config
from lamella.specdec.config import OTHER_KEYS, OTHER_METHODS


def test_reads_vllms_words():
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    assert parse_speculative_config(text) == NgramConfig(5, 2, 4, "rightmost")


@pytest.mark.parametrize(
    ("given", "shortest", "longest"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": None}, 2, 2),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 7}, 1, 7),
    ],
)
def test_one_lookup_length_copies_the_other(given, shortest, longest):
    config = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 3, **given})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (shortest, longest)


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_the_method_may_stand_in_the_models_place(model):
    assert parse_speculative_config({"model": model, "num_speculative_tokens": 3}).num_speculative_tokens == 3


def test_match_chooses_the_occurrence():
    config = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 3, "match": "earliest"})
    assert config.match == "earliest"


def test_arbitrary_drafts_have_nothing_but_their_number():
    config = parse_speculative_config({"method": "arbitrary", "num_speculative_tokens": 7})
    assert config == ArbitraryConfig(7)
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        parse_speculative_config({"method": "arbitrary"})
    with pytest.raises(ConfigError, match="'prompt_lookup_max' is not supported with method \"arbitrary\""):
        parse_speculative_config({"method": "arbitrary", "num_speculative_tokens": 7, "prompt_lookup_max": 2})


def test_reads_vllms_words_for_suffix_decoding():
    config = parse_speculative_config({"method": "suffix", "num_speculative_tokens": 8})
    assert config == SuffixConfig(8, 24, 10_000, 1_000_000, 1.0, 0.0, 0.1)
    options = {
        "method": "suffix",
        "suffix_decoding_max_tree_depth": 32,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_cached_tokens": 500,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_max_spec_offset": 1.5,
        "suffix_decoding_min_token_prob": 0.25,
        "enable_adaptive_verification": False,
    }
    assert parse_speculative_config(options) == SuffixConfig(32, 32, 0, 500, 2.0, 1.5, 0.25, adaptive=False)


GOOD = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('"ngram"', "must be a JSON object"),
        ({}, "method is missing"),
        ({"method": "telepathy", "num_speculative_tokens": 1}, "'telepathy', there is no such method"),
        ({"model": "org/small", "num_speculative_tokens": 1}, "'org/small'"),
        ({"method": "ngram", "model": "org/small", "num_speculative_tokens": 1}, "'org/small', but method"),
        ({"method": "draft_model", "num_speculative_tokens": 1}, 'model is missing; method "draft_model"'),
        ({"method": "draft_model", "model": "a"}, "num_speculative_tokens is missing"),
        ({"method": "draft_model", "model": "", "num_speculative_tokens": 1}, "model is empty"),
        ({"method": "draft_model", "model": 3, "num_speculative_tokens": 1}, "model must be a text, got 3"),
        ({"method": "draft_model", "model": "a", "num_speculative_tokens": 0}, "got 0"),
        ({"method": "draft_model", "model": "a", "prompt_lookup_max": 2}, 'with method "draft_model"'),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({**GOOD, "prompt_lookup": 3}, "unknown key 'prompt_lookup'"),
        ({**GOOD, "num_speculative_tokens": 0}, r"num_speculative_tokens must be in \[1, 128\], got 0"),
        ({**GOOD, "num_speculative_tokens": 129}, "got 129"),
        ({**GOOD, "num_speculative_tokens": True}, "must be an integer, got True"),
        ({**GOOD, "num_speculative_tokens": 2.5}, "must be an integer, got 2.5"),
        ({**GOOD, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min is 4, above prompt_lookup_max 3"),
        ({**GOOD, "prompt_lookup_max": 65}, r"prompt_lookup_max must be in \[1, 64\], got 65"),
        ({**GOOD, "prompt_lookup_min": 0, "prompt_lookup_max": 5}, "prompt_lookup_min must be in"),
        ({**GOOD, "match": "leftmost"}, "match must be"),
        ({**GOOD, "match": 3}, "match must be"),
        ({**GOOD, "suffix_decoding_max_tree_depth": 9}, "'suffix_decoding_max_tree_depth' is not supported with"),
        ({**SUFFIX, "prompt_lookup_max": 3}, "'prompt_lookup_max' is not supported with method \"suffix\""),
        ({**SUFFIX, "quantization": "fp8"}, "'quantization' is not supported with method \"suffix\""),
        ({**SUFFIX, "suffix_decoding_depth": 3}, "unknown key 'suffix_decoding_depth'"),
        ({**SUFFIX, "suffix_decoding_max_tree_depth": 1}, r"max_tree_depth must be in \[2, 128\], got 1"),
        ({**SUFFIX, "suffix_decoding_max_tree_depth": 4.0}, "suffix_decoding_max_tree_depth must be an integer"),
        ({**SUFFIX, "suffix_decoding_max_cached_requests": -1}, "max_cached_requests must be in"),
        ({**SUFFIX, "suffix_decoding_max_cached_tokens": 0}, "max_cached_tokens must be in"),
        ({**SUFFIX, "suffix_decoding_max_spec_factor": "1"}, "suffix_decoding_max_spec_factor must be a number"),
        ({**SUFFIX, "suffix_decoding_max_spec_factor": -0.5}, "max_spec_factor must be in"),
        ({**SUFFIX, "suffix_decoding_max_spec_factor": 0}, "allow no draft"),
        (
            {**SUFFIX, "suffix_decoding_max_spec_offset": float("nan")},
            "suffix_decoding_max_spec_offset must be a number",
        ),
        ({**SUFFIX, "enable_adaptive_verification": 1}, "enable_adaptive_verification must be true or false, got 1"),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 1.1}, "min_token_prob must be in"),
        ({**SUFFIX, "num_speculative_tokens": 129}, "got 129"),
    ],
)
def test_mistakes_are_named(value, message):
    with pytest.raises(ConfigError, match=message):
        parse_speculative_config(value)


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_methods_of_others_are_refused_by_name(method):
    with pytest.raises(ConfigError, match=f"method is '{method}', it is not supported yet"):
        parse_speculative_config(json.dumps({"method": method, "num_speculative_tokens": 1}))


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_keys_of_other_methods_are_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"'{key}' is not supported with method"):
        parse_speculative_config({**GOOD, key: 1})
