"""How byte-level BPE vocabularies cut text into words before merging, by the name that GGUF files give it.

A GGUF file does not hold the pre-tokenizer, only the name of its kind (`tokenizer.ggml.pre`). This table says what each
name means, in the terms of the tokenizer that the model was trained with: which normalizer, which splits (each applied
to the pieces that the one before left), whether GPT-2's own pattern comes last, and whether a word that is in the
vocabulary as a whole skips the merges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

from lamella.engine.errors import StartError

DIGITS = "each digit alone"
"""Marks a split before and behind every digit."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

# The letters with case that the DeepSeek LLM tokenizer lists (an older Unicode's, without mathematical alphabets).
_CASED_RANGES = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)


class PreKind(NamedTuple):
    """How text is cut before merging."""

    splits: tuple[str, ...] = ()
    """DIGITS, or patterns whose matches become pieces of their own."""
    gpt2_pattern: bool = False
    """GPT-2's pattern is the last split."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is a token is not cut by the merges."""
    add_bos: bool = False
    """BOS goes first where the file does not say."""

    def pre_tokenizer(self) -> Any:
        steps: list[Any] = []
        for split in self.splits:
            if split == DIGITS:
                steps.append(pre_tokenizers.Digits(individual_digits=True))
            else:
                steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_pattern))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any | None:
        return normalizers.NFC() if self.nfc else None


def pre_kind(name: str) -> PreKind:
    """The kind of that name; StartError listing the known ones where there is none."""
    kind = _KINDS.get(name)
    if kind is None:
        raise StartError(
            f"the GGUF file's tokenizer needs the pre-tokenizer {name!r}, which is not known here; use the model's "
            f"folder with tokenizer.json instead. Known: {', '.join(known_pre_kinds())}"
        )
    return kind


def known_pre_kinds() -> list[str]:
    """All names, sorted."""
    return sorted(_KINDS)


def _words(digits: str, *, marks: str = "", contractions: str = _CONTRACTIONS + "|") -> str:
    """The pattern that most vocabularies share: words with one sign in front, groups of digits, signs, spaces."""
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    sign = r"[^\r\n\p{L}\p{N}]?"
    return rf"{contractions}{sign}{letters}|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, contractions: str = "") -> str:
    """Words cut where lower case turns to upper case."""
    sign = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{sign}{_UPPER}*{_LOWER}+{contractions}|{sign}{_UPPER}+{_LOWER}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _character_class(ranges: str) -> str:
    ends = ([chr(int(end, 16)) for end in part.split("-")] for part in ranges.split())
    return "[" + "".join("-".join(pair) for pair in ends) + "]"


_GPT2 = PreKind(gpt2_pattern=True)
_DIGITS_GPT2 = PreKind((DIGITS,), gpt2_pattern=True)
_LLAMA3 = PreKind((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_LLAMA3_MERGED = PreKind((_words(r"\p{N}{1,3}"),))
_QWEN2 = PreKind((_words(r"\p{N}"),), nfc=True)
_QWEN2_RAW = PreKind((_words(r"\p{N}"),))
_DEEPSEEK3 = PreKind(
    (
        r"\p{N}{1,3}",
        _CJK_HAN_KANA,
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_GPT4O = PreKind((_cased_words(r"\p{N}{1,3}", _CONTRACTIONS + "?"),), ignore_merges=True)
_BLOOM = PreKind((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",))
_BAILING = PreKind(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)

_KINDS: dict[str, PreKind] = {
    # What a file means that does not say: signs, GPT-2's words, digits in threes.
    "default": PreKind(
        (
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        )
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "jais", "trillion", "exaone4"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), _GPT2._replace(nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2),
    "command-r": _DIGITS_GPT2._replace(nfc=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_MERGED),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), _QWEN2),
    "qwen35": PreKind((_words(r"\p{N}", marks=r"\p{M}"),), nfc=True),
    **dict.fromkeys(("stablelm2", "megrez", "hunyuan", "kormo", "solar-open", "grok-2"), _QWEN2_RAW),
    "ufakzeka": PreKind((_words(r"\p{N}", contractions=""),)),
    "seed-coder": PreKind((_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,)),
    "minicpm5": PreKind((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    "laguna": PreKind((r"[^\n]+|[\n]+", _words(r"\p{N}"))),
    "deepseek-llm": PreKind(
        (
            r"[\r\n]",
            r"\s?" + _character_class(_CASED_RANGES) + "+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            DIGITS,
        )
    ),
    "deepseek-coder": PreKind(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", DIGITS)
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "tekken": PreKind((_cased_words(r"\p{N}"),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    "viking": PreKind((*_BLOOM.splits, DIGITS)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
}
