"""A tokenizer from a model folder in the Hugging Face layout.

tokenizer.json            vocabulary, merges, pre-tokenizer, decoder, added tokens          needed
tokenizer_config.json     special tokens, add_bos_token, add_eos_token, chat_template
special_tokens_map.json   special tokens, where tokenizer_config.json lacks them
chat_template.jinja       chat template; wins over the one in tokenizer_config.json
chat_template.json        the same in older repositories
additional_chat_templates/NAME.jinja      named ones
generation_config.json    more end-of-sequence ids; config.json where it is missing
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import tokenizers

from lamella.engine.errors import StartError
from lamella.engine.text.tokenizer_parts import TokenizerParts

logger = logging.getLogger(__name__)


def read_folder(folder: Path) -> TokenizerParts:
    """Raises StartError that names the file which is missing or unreadable."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise StartError(_without_tokenizer_json(folder))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartError(f"{file} cannot be read as a tokenizer: {reason}") from error
    backend.no_truncation()
    backend.no_padding()
    config = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    _add_missing_tokens(backend, config)

    def token_id(name: str) -> int | None:
        content = _content(config.get(name))
        found = backend.token_to_id(content) if content is not None else None
        if content is not None and found is None:
            logger.warning("%s: %s %r is not in the vocabulary", folder, name, content)
        return found

    bos_id, eos_id, unk_id, pad_id = (token_id(f"{name}_token") for name in ("bos", "eos", "unk", "pad"))
    special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
    special.update(id for id in (bos_id, eos_id, unk_id, pad_id) if id is not None)
    add_bos, add_eos = _flag(config, "add_bos_token"), _flag(config, "add_eos_token")
    return TokenizerParts(
        backend=backend,
        source=str(folder),
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        bos_id=bos_id,
        eos_ids=_end_ids(folder, eos_id),
        unk_id=unk_id,
        pad_id=pad_id,
        # One flag given and the other not: the other is off, as the flags together replace the post-processor.
        add_bos=add_bos if add_eos is None else bool(add_bos),
        add_eos=add_eos if add_bos is None else bool(add_eos),
        special_ids=frozenset(special),
        chat_templates=_chat_templates(folder, config),
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the file does not exist."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{file} must hold a JSON object, found {type(value).__name__}")
    return value


def _without_tokenizer_json(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    others = [
        name for name in ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model") if (folder / name).exists()
    ]
    found = f" (it has {', '.join(others)}, which is another format)" if others else ""
    return (
        f"{folder} has no tokenizer.json{found}; take the file from the model's repository, or write it with "
        f"transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def _content(token: Any) -> str | None:
    """A special token is written as text or as an object with its text under "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str) or any("\ud800" <= character <= "\udfff" for character in token):
        return None
    return token or None


def _flag(config: dict[str, Any], name: str) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json lists, in the order of their ids."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, entry in sorted((int(id), entry) for id, entry in listed.items() if id.isdigit()):
        content = _content(entry) if isinstance(entry, dict) else None
        if content is None or content in known:
            continue
        token = tokenizers.AddedToken(
            content,
            single_word=bool(entry.get("single_word")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            normalized=bool(entry.get("normalized")),
            special=bool(entry.get("special")),
        )
        backend.add_tokens([token])


def _end_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """The tokenizer's EOS, then those of the generation settings."""
    settings = read_json(folder / "generation_config.json")
    if "eos_token_id" not in settings:
        model = read_json(folder / "config.json")
        text = model.get("text_config")
        settings = text if "eos_token_id" not in model and isinstance(text, dict) else model
    listed = settings.get("eos_token_id")
    more = listed if isinstance(listed, list) else [listed]
    ids = [eos_id, *(id for id in more if isinstance(id, int))]
    return tuple(dict.fromkeys(id for id in ids if id is not None and id >= 0))


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    written = config.get("chat_template")
    if isinstance(written, str):
        templates["default"] = written
    elif isinstance(written, list):
        for entry in written:
            name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if isinstance(name, str) and isinstance(text, str):
                templates[name] = text
    elif isinstance(written, dict):
        templates.update({name: text for name, text in written.items() if isinstance(text, str)})
    older = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(older, str):
        templates["default"] = older
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{file} cannot be read: {error}") from error
