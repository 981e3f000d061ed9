"""Generate text with a small Llama through the KV cache; with --compare, say what the cache was worth."""

import argparse
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

try:
    from kvcache import KVCacheError, runner
    from kvcache.errors import sentence
    from kvcache.layer import DTYPES
    from kvcache.tools.arguments import parse_tokens, prompt_bytes
except ModuleNotFoundError as error:
    sys.exit(f"generate.py: there is no module {error.name}; run: pip install -e .")
except KeyboardInterrupt:
    sys.exit(130)

PROMPT = "ROMEO:"
MODEL = Path(__file__).parent / "model"
EXAMPLES = """\
examples:
  python examples/generate.py "ROMEO:"
      the text; the speed is a line on stderr
  python examples/generate.py "ROMEO:" --compare
      then a table: the speed without the cache, and what each type loses
  python examples/generate.py "ROMEO:" --temperature 0 --tokens 100
      always the likeliest token
  python examples/generate.py "ROMEO:" --dtype q8_0
      a cache of half the size, and nearly the same model
  python examples/generate.py "ROMEO:" --window 256 --tokens 5000
      beyond the model's context, in constant memory
  python examples/generate.py "ROMEO:" --shift --tokens 5000
      beyond it, by forgetting half of it when it is full
  python examples/generate.py --dtype bf16 < play.txt
      continue a file
  python examples/generate.py "KING:" --quiet > text.txt
      the text only
  python examples/generate.py Llama-3.2-1B-Q8_0.gguf "Once"
      another model: a folder, or a GGUF file

Without --window or --shift the text stops when the model's context is full.
With a window it goes on; positions keep growing, but rotary keys only tell
distances, and inside the window these stay as trained. Sink tokens fall further
and further behind: keep them few. With --shift a full context loses the older
half of its tokens, except the first ones. The rest moves down, and nothing is
computed again.

Ctrl-C ends the text. It also ends the measuring of --compare, which then shows
the rows that are done. The exit status is 130.
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # in one sentence, without the usage
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> Parser:
    options = runner.Options()
    p = Parser(
        prog="generate.py",
        description="Continue a prompt with a model of Llama's family, through the cache.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="Hugging Face folder or GGUF file of a Llama, Mistral or Qwen (default: model, beside this file)",
    )
    p.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help=f"text to continue; - or a pipe: standard input (default: {PROMPT}); a single argument is the prompt",
    )
    p.add_argument(
        "--prompt-file", metavar="FILE", type=Path, help="read the prompt from a file; -: from standard input"
    )
    p.add_argument("--model", metavar="MODEL", dest="model_option", help="the same as the argument MODEL")
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        default=options.dtype,
        help="element type of the cache (default: %(default)s)",
    )
    p.add_argument("--window", metavar="N", type=parse_tokens, help="each token sees the last N only (default: all)")
    p.add_argument(
        "--shift",
        action="store_true",
        help="when the model's context is full, drop the older half of it and go on",
    )
    p.add_argument(
        "--sink-tokens",
        metavar="N",
        type=parse_tokens,
        dest="num_sink_tokens",
        help=f"the first N tokens stay (default: none with --window, {runner.FIRST_TOKENS_KEPT} with --shift)",
    )
    p.add_argument(
        "--tokens",
        metavar="N",
        type=parse_tokens,
        default=options.max_new_tokens,
        dest="max_new_tokens",
        help="how many to generate, such as 300 or 2k (default: %(default)s)",
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
        action="store_true",
        help="after the text, repeat some of its steps without the cache, run the model's eval.txt through a cache of "
        "each element type, with the same window, and show a table of tokens per second, of bytes of cache for a "
        "token, and of what each type does to the model: a few seconds",
    )
    p.add_argument("--quiet", action="store_true", help="write the text only, and measure nothing")
    return p


def main() -> int:
    p = parser()
    arguments = vars(p.parse_intermixed_args())
    names = "model", "model_option", "prompt", "prompt_file"
    model, model_option, prompt, prompt_file = (arguments.pop(name) for name in names)
    if prompt is not None and prompt_file is not None:
        p.error("give a prompt or --prompt-file, not both")
    if prompt is None and prompt_file is None:
        model, prompt = None, model
    if model is not None and model_option is not None:
        p.error("give the model as an argument or as --model, not both")
    try:
        text = prompt_bytes(prompt, prompt_file, PROMPT)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an ASCII terminal
        return runner.run(model or model_option or MODEL, text, runner.Options(**arguments), sys.stdout)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (runner.LlamaError, KVCacheError, OSError, ImportError) as error:
        p.error(sentence(error))


if __name__ == "__main__":
    sys.exit(main())
