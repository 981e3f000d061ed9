"""Generate text with a small Llama through the KV cache, and say what the cache was worth."""

import argparse
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

try:
    from kvcache import KVCacheError, runner
    from kvcache.layer import DTYPES
    from kvcache.models.reading import read_prompt
except ModuleNotFoundError as error:
    sys.exit(f"generate.py: there is no module {error.name}; run: pip install -e .")
except KeyboardInterrupt:
    sys.exit(130)

EXAMPLES = """\
examples:
  python examples/generate.py "ROMEO:"                               the text, then the table
  python examples/generate.py "ROMEO:" --temperature 0 --tokens 100  always the likeliest token
  python examples/generate.py "ROMEO:" --dtype q8_0                  a cache of half the size, and nearly the same model
  python examples/generate.py "ROMEO:" --window 256 --tokens 5000    beyond the model's context, in constant memory
  python examples/generate.py "ROMEO:" --shift --tokens 5000         beyond it, by forgetting half of it when it is full
  python examples/generate.py --prompt-file play.txt --dtype bf16    continue a file
  python examples/generate.py "KING:" --quiet > text.txt             the text only
  python examples/generate.py --model Llama-3.2-1B-Q8_0.gguf "Once"  another model: a folder, or a GGUF file

Without --window or --shift the text stops when the model's context is full. With a window it goes on; positions keep
growing, but rotary keys only tell distances, and inside the window these stay as trained. Sink tokens fall further and
further behind: keep them few. With --shift a full context loses the older half of its tokens, but for the first ones;
the rest moves down, and nothing is computed again.

Ctrl-C ends the text, or the measuring after it, and shows the table; the exit status is 130.
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # in one sentence, without the usage
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> Parser:
    options = runner.Options()
    p = Parser(
        prog="generate.py",
        description="Continue a prompt with a model of Llama's family, and end with a table: tokens per second with\n"
        "and without the cache, bytes of cache per token, and what each element type does to the model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("prompt", nargs="?", help='text to continue (default: "ROMEO:")')
    p.add_argument("--prompt-file", metavar="FILE", type=Path, help="read the prompt from a file instead")
    p.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        default=Path(__file__).parent / "model",
        help="Hugging Face folder or GGUF file of a Llama, Mistral or Qwen (default: model, beside this file)",
    )
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        default=options.dtype,
        help="element type of the cache (default: %(default)s)",
    )
    p.add_argument("--window", metavar="N", type=int, help="each token sees the last N only (default: all)")
    p.add_argument(
        "--shift",
        action="store_true",
        help="when the model's context is full, drop the older half of it and go on",
    )
    p.add_argument(
        "--sink-tokens",
        metavar="N",
        type=int,
        dest="num_sink_tokens",
        help=f"the first N tokens stay (default: none with --window, {runner.FIRST_TOKENS_KEPT} with --shift)",
    )
    p.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=options.max_new_tokens,
        dest="max_new_tokens",
        help="how many to generate (default: %(default)s)",
    )
    p.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=options.seed,
        help="the same seed gives the same text (default: %(default)s)",
    )
    p.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=options.temperature,
        help="0: always the likeliest token; 1: as the model was trained (default: %(default)s)",
    )
    p.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=options.top_p,
        help="draw from the likeliest tokens that together have this probability (default: %(default)s)",
    )
    p.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=options.compare,
        help="after the text, repeat some of its steps without the cache, and run the model's eval.txt through "
        "a cache of each element type, with the same window: a few seconds (default: yes)",
    )
    p.add_argument("--quiet", action="store_true", help="write the text only, and measure nothing")
    return p


def main() -> int:
    p = parser()
    arguments = vars(p.parse_args())
    prompt, prompt_file, model = (arguments.pop(name) for name in ("prompt", "prompt_file", "model"))
    if prompt is not None and prompt_file is not None:
        p.error("give a prompt or --prompt-file, not both")
    try:
        text = read_prompt(prompt_file) if prompt_file else os.fsencode("ROMEO:" if prompt is None else prompt)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an ASCII terminal
        return runner.run(model, text, runner.Options(**arguments), sys.stdout)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (runner.LlamaError, KVCacheError, OSError, ImportError) as error:
        p.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
