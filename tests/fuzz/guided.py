"""Fuzz code in Python: run inputs, and random alterations of them; keep the inputs that reach new code.

    python guided.py NAME --alter N       run each input, then N alterations of it, the same ones each time
    python guided.py NAME --seconds N     look for more inputs, for N seconds; --keep adds them to NAME.txt

NAME is a module beside this one. Its ``seeds()`` returns inputs, and alterations insert its ``WORDS``. Its
``run(data)`` raises an error if a promise is broken. More inputs are lines of NAME.txt, in hexadecimal digits. An input
that fails is cut short, and printed as a line for NAME.txt. If an input ends the process, the file that --last names
has it.
"""

import argparse
import copy
import faulthandler
import importlib
import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path

import kvcache

PACKAGE = str(Path(kvcache.__file__).parent)
MAX_BYTES = 4096  # of an input
HANGS = 120  # seconds after which an input is taken to run for ever

# ---- alterations

INTEGERS = [0, 1, 2, 3, 7, 8, 63, 64, 255, 256, 4095, 4096, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, -1]
VALUES = [None, True, False, "", [], {}, 0.5, 1e308, 5e-324, float("nan"), float("inf"), 10**400, "\ud800", "\x1b[2J"]


def place(chance, data):
    """Return a random offset; often one near the beginning, where an input says what the rest is."""
    return int(len(data) * chance.random() ** chance.choice([1, 3]))


def part(chance, data):
    begin = place(chance, data)
    return data[begin : begin + int(2 ** chance.uniform(0, 8))]


def flip(chance, data, _other, _words):
    data[place(chance, data)] ^= 1 << chance.randrange(8)


def write_integer(chance, data, _other, _words):
    size, at = chance.choice([1, 2, 4, 8]), place(chance, data)
    before = int.from_bytes(data[at : at + size], "little")
    after = before + chance.randint(-4, 4) if chance.random() < 0.5 else chance.choice(INTEGERS)
    data[at : at + size] = (after % 256**size).to_bytes(size, "little")


def remove(chance, data, _other, _words):
    at = place(chance, data)
    del data[at : at + len(part(chance, data))]


def cut(chance, data, _other, _words):
    del data[place(chance, data) :]


def copy_part(chance, data, other, _words):
    """Put a part of this input, or of another one, somewhere: between bytes, or over them."""
    new, at = part(chance, chance.choice([data, other])), place(chance, data)
    data[at : at + chance.choice([0, len(new)])] = new


def write_word(chance, data, _other, words):
    new, at = chance.choice(words).encode(errors="surrogatepass"), place(chance, data)
    data[at : at + chance.choice([0, len(new)])] = new


def alter_json(chance, data, other, words):
    """Alter one value of the JSON object that an input has in it: its name, its content, or its depth."""
    values, begin, end = find_json(data)
    if begin < 0:
        return
    parts = list(parts_of(values))
    holder, key = chance.choice(parts) if parts else (values, "a")
    others = list(parts_of(find_json(other)[0]))
    way = chance.randrange(6)
    if way == 0 and parts:
        del holder[key]
    elif way == 1 and others:
        values_of_other, name = chance.choice(others)
        holder[key] = values_of_other[name]
    elif way == 2 and isinstance(holder, dict):
        holder[chance.choice(words)] = holder.get(key)
    elif way == 3 and parts:
        holder[key] = chance.choice([[holder[key]], {chance.choice(words): holder[key]}, [holder[key]] * 3])
    else:
        holder[key] = copy.copy(chance.choice(INTEGERS + VALUES + words))
    data[begin:end] = json.dumps(values, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")


def find_json(data):
    """Return the object at the first brace, its beginning and its end; -1: there is no object."""
    begin = data.find(b"{")
    try:
        text = data[begin:].decode(errors="surrogateescape")
        values, length = json.JSONDecoder().raw_decode(text)
        return values, begin, begin + len(text[:length].encode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return {}, -1, -1


def parts_of(values):
    """Yield each container within a JSON value, with each of its keys or indices."""
    for key in values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ():
        yield values, key
        yield from parts_of(values[key])


ALTERATIONS = [flip, write_integer, remove, cut, copy_part, copy_part, write_word, alter_json, alter_json, alter_json]


def alter(chance, data, other, words):
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4])):
        data = data or bytearray(1)
        chance.choice(ALTERATIONS)(chance, data, bytearray(other), words)
    return bytes(data[:MAX_BYTES])


# ---- what an input reaches


class Reached:
    """The steps from line to line in kvcache that inputs have made so far."""

    def __init__(self):
        self.steps = set()

    def trace(self, frame, _event, _argument):
        code, last = frame.f_code, 0
        if not code.co_filename.startswith(PACKAGE):
            return None

        def step(frame, event, _argument):
            nonlocal last
            if event == "line":
                self.steps.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step

    def by(self, run, data):
        """Run an input; return whether it made a new step."""
        before = len(self.steps)
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            run(data)
        finally:
            sys.settrace(None)
            threading.settrace(None)
        return len(self.steps) > before


# ---- runs


class Fuzzer:
    def __init__(self, name, last):
        self.module = importlib.import_module(name)
        self.file = Path(self.module.__file__).with_suffix(".txt")
        self.inputs = list(self.module.seeds())
        self.inputs += [bytes.fromhex(line) for line in self.file.read_text().split()] if self.file.exists() else []
        self.last = Path(last) if last else None
        self.num_runs, self.slowest = 0, (0.0, b"")

    def run(self, data):
        self.num_runs += 1
        if self.last:
            self.last.write_bytes(data)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        begin = time.process_time()
        self.module.run(data)
        self.slowest = max(self.slowest, (time.process_time() - begin, data))

    def fails(self, data):
        """Return the error's type and the function that raised it; None if the input passes."""
        try:
            self.run(data)
        except Exception as error:
            return type(error), traceback.extract_tb(error.__traceback__)[-1].name
        return None

    def check(self, run, data):
        """Run an input, by itself once more if it fails; end with the shortest input found that fails alike."""
        try:
            return run(data)
        except Exception:
            if (how := self.fails(data)) is None:  # only traced: it is slow then
                return False
        size = len(data)
        while size := size // 2:
            for at in range(0, len(data), size):
                if self.fails(shorter := data[:at] + data[at + size :]) == how:
                    data = shorter
        print(f"{self.module.__name__} fails on\n{data.hex()}", flush=True)
        self.run(data)
        return False

    def replay(self, times):
        chance = random.Random(1)
        for data in self.inputs:
            self.check(self.run, data)
            for _ in range(times):
                self.check(self.run, alter(chance, data, chance.choice(self.inputs), self.module.WORDS))

    def search(self, seconds, seed, keep):
        chance, reached, end = random.Random(seed), Reached(), time.monotonic() + seconds
        for data in self.inputs:
            self.check(lambda data: reached.by(self.run, data), data)
        num_known, num_given = len(reached.steps), len(self.inputs)
        while time.monotonic() < end:
            data, other = (self.inputs[place(chance, self.inputs)] for _ in range(2))
            data = alter(chance, data, other, self.module.WORDS)
            if self.check(lambda data: reached.by(self.run, data), data):
                self.inputs.append(data)
                if keep:
                    with self.file.open("a") as file:
                        file.write(f"{data.hex()}\n")
        print(f"{len(reached.steps)} steps, {num_known} of them known; {len(self.inputs) - num_given} new inputs")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--alter", type=int, default=0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--last")
    options = parser.parse_args()
    fuzzer = Fuzzer(options.name, options.last)
    if options.seconds is None:
        fuzzer.replay(options.alter)
    else:
        print(f"seed {options.seed}", flush=True)
        fuzzer.search(options.seconds, options.seed, options.keep)
    print(f"{fuzzer.num_runs} runs, the slowest {fuzzer.slowest[0]:.2f} s: {fuzzer.slowest[1][:200].hex()}")
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # threads of stores may still wait


if __name__ == "__main__":
    main()
