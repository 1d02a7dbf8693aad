"""Answer one prompt.

  lamella run smollm2 --message "Why is the sky blue?"
  lamella run smollm2 --prompt "The capital of France is" --max-tokens 8 --temperature 0 --json

--message applies the model's chat template; --prompt is raw text (BOS only where the tokenizer adds it). The text
streams to standard output. With --json, standard output holds one JSON object and nothing else: text,
prompt_token_ids, output_token_ids, ttft_s, tokens_per_s, finish_reason.
"""

from __future__ import annotations

import argparse
import json

import lamella.engine as lamella
from lamella.engine.cli.sampling_flags import add_sampling_flags, sampling_params
from lamella.engine.config.flags import add_flags, add_model, options_from
from lamella.engine.config.schema import EngineOptions
from lamella.engine.console import dim, note, read_input
from lamella.engine.errors import EngineError, StartError

MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="raw text to go on with; - reads standard input")
    what.add_argument("--message", metavar="TEXT", help="a user's message; - reads standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message before --message")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    add_sampling_flags(parser, max_tokens=MAX_TOKENS)
    # a single request, whose seed is a sampling flag, and whose prefix nobody takes up again
    skip = ("model", "seed", "scheduling_policy", "max_logprobs", "enable_prefix_caching")
    add_flags(parser, EngineOptions, skip=skip)


def run(args: argparse.Namespace) -> int:
    if args.prompt is None and args.message is None:
        raise StartError("give --prompt TEXT or --message TEXT")
    if args.system is not None and args.message is None:
        raise StartError("--system goes with --message; --prompt is raw text")
    if args.chat_template is not None and args.message is None:
        raise StartError("--chat-template goes with --message; --prompt is raw text")
    given = args.prompt if args.prompt is not None else args.message
    text = read_input() if given == "-" else given
    options = options_from(args, EngineOptions, model=args.model)
    sampling_params(args, {})
    with lamella.LLM.from_options(options, progress=not args.json) as llm:
        params = sampling_params(args, {"max_tokens": MAX_TOKENS, **llm.sampling_defaults})
        if args.message is not None:
            messages = [{"role": "user", "content": text}]
            if args.system is not None:
                messages.insert(0, {"role": "system", "content": args.system})
            stream = llm.stream_chat(messages, params)
        else:
            stream = llm.stream(text, params)
        for piece in stream:
            if not args.json:
                print(piece, end="", flush=True)
        output = stream.output
    if output.error is not None:
        raise EngineError(f"the answer broke off: {output.error}")
    completion = output.outputs[0]
    if args.json:
        print(
            json.dumps(
                {
                    "text": completion.text,
                    "prompt_token_ids": output.prompt_token_ids,
                    "output_token_ids": completion.token_ids,
                    "ttft_s": output.ttft_s,
                    "tokens_per_s": output.tokens_per_s,
                    "finish_reason": completion.finish_reason,
                }
            )
        )
    else:
        print()
        note(dim(summary(output)))
    return 0


def summary(output: lamella.RequestOutput) -> str:
    """'18 tokens at 143.2 tokens/s, first after 0.05 s'."""
    count = len(output.outputs[0].token_ids)
    speed = f" at {output.tokens_per_s:.1f} tokens/s" if output.tokens_per_s else ""
    return f"{count} tokens{speed}, first after {output.ttft_s:.2f} s ({len(output.prompt_token_ids)} prompt tokens)"
