"""A tokenizer whose tokens are bytes: ids 0-255, then the special tokens <bos> 256, <eos> 257 and <end> 258."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lamella.engine.text.tokenizer import Tokenizer
from lamella.engine.text.tokenizer_parts import TokenizerParts

BOS, EOS, END = 256, 257, 258

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(*, add_bos: bool = False) -> Tokenizer:
    """A real Tokenizer over 259 tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    vocab = {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>", "<end>")])
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            source="bytes",
            vocab_size=259,
            bos_id=BOS,
            eos_ids=(EOS,),
            add_bos=add_bos,
            add_eos=False,
            special_ids=frozenset({BOS, EOS, END}),
            chat_templates={"default": CHAT_TEMPLATE},
        )
    )
