"""A tiny byte-level BPE tokenizer with a chat template, so that a tiny checkpoint can be served.

[0, 3)        <|endoftext|>, <|im_start|> (begin), <|im_end|> (end)
[3, 259)      the 256 bytes
[259, 320)    merges that spell common words
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

VOCAB_SIZE = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = (
    "the",
    "and",
    "for",
    "you",
    "that",
    "with",
    "user",
    "assistant",
    "this",
    "from",
    "have",
    "are",
    "was",
    "not",
) + ("but", "what", "when", "system", "there", "can", "all")


class Vocabulary(NamedTuple):
    tokens: list[str]
    """By id, in GPT-2's printable spelling of bytes."""
    merges: list[tuple[str, str]]


def vocabulary() -> Vocabulary:
    """Merges build each word, with the space in front, from left to right."""
    tokens = [*SPECIAL, *_byte_letters()]
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        spelled = "Ġ"
        for letter in word:
            if len(tokens) == VOCAB_SIZE:
                return Vocabulary(tokens, merges)
            if spelled + letter not in tokens:
                merges.append((spelled, letter))
                tokens.append(spelled + letter)
            spelled += letter
    raise AssertionError("too few words to fill the vocabulary")


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json (with the chat template)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # a test dependency

    tokens, merges = vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS_ID],
        "eos_token": SPECIAL[EOS_ID],
        "pad_token": SPECIAL[PAD_ID],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it is printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, extra = [], 0
    for byte in range(256):
        letters.append(chr(byte) if byte in printable else chr(256 + extra))
        extra += byte not in printable
    return letters
