"""`Engine`: requests that share passes get the tokens that ``generate`` alone gives them, and fail alone."""

import asyncio
import contextlib
import functools
import gc
import os
import queue
import random
import threading
import time
import weakref

import numpy as np
import pytest

import kvcache
from kvcache.errors import CacheFullError, NotSupportedError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from support.hf_pairs import BASE, CONFIGS, HYBRID, make, model_of, prefix_for, random_tokens  # noqa: E402 - torch may be missing
from support.servers import until  # noqa: E402 - as above

from kvcache import selecting  # noqa: E402 - it imports those
from kvcache.hf import Engine, HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

FEW = ["gemma3", "qwen3_next"]
KINDS = [
    *CONFIGS,
    *(name for name in HYBRID if name not in ("jamba", "zamba2")),
]  # which go on by single tokens, or scan
SERVED = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
LONG = 60.0  # seconds, after which a test has failed
ROOM = {"max_bytes": 1 << 24}


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


def prompts_of(lengths, seed=3):
    return [random_tokens(1, n, seed=seed + i)[0].tolist() for i, n in enumerate(lengths)]


def alone(model, prompt, **options):
    """Return what ``generate`` alone makes of a prompt."""
    given = {"max_new_tokens": 8, "attention_mask": torch.ones(1, len(prompt), dtype=torch.long), **options}
    return model.generate(torch.tensor([prompt]), past_key_values=HFCache(model.config, "f32"), **given)[0].tolist()


def answers(requests):
    return [request.result(LONG)[0].tolist() for request in requests]


def failing(at):
    """Return a processor that raises for a text of so many tokens."""

    def process(ids, scores):
        if ids.shape[1] == at:
            raise ZeroDivisionError("a processor's own")
        return scores

    return [process]


class Slow(transformers.LogitsProcessor):
    """Waits with each token, so that an answer takes its time."""

    def __call__(self, ids, scores):
        time.sleep(0.02)
        return scores


@contextlib.contextmanager
def held(engine):
    """No pass begins meanwhile: requests that are submitted here come together."""
    reached, go_on = threading.Event(), threading.Event()

    def hold(ids, scores):
        reached.set()
        go_on.wait(LONG)
        return scores

    engine.submit([1], max_new_tokens=1, logits_processor=[hold])
    assert reached.wait(LONG)
    try:
        yield
    finally:
        go_on.set()


# ---- the tokens


@pytest.mark.parametrize("kind", SERVED)
def test_tokens(kind):
    """Texts of many lengths, some with a common beginning, then the next turn of each."""
    model = model_of(kind)
    first, *others = prompts_of([40, 1, 2, 7, 33])
    prompts = [first, first[:20] + others[0], first[:39], *others]
    with Engine(model, "f32", prompt_tokens=16, block_size=4, **ROOM) as engine:
        texts = answers([engine.submit(prompt, max_new_tokens=8) for prompt in prompts])
        turns = [engine.submit([*text, 5], max_new_tokens=4) for text in texts]
        longer = answers(turns)
        assert all(turn.num_matched >= len(text) - 2 for turn, text in zip(turns, texts, strict=True))
    model.set_attn_implementation("kvcache")
    assert texts == [alone(model, prompt) for prompt in prompts]
    assert longer == [alone(model, [*text, 5], max_new_tokens=4) for text in texts]


def test_logprobs(model):
    """They are the model's own, whatever changes the scores behind it; without the argument there are none."""
    [prompt] = prompts_of([9])
    with Engine(model, "f32", **ROOM) as engine:
        options = {"max_new_tokens": 5, "do_sample": False, "repetition_penalty": 1.5}
        request = engine.submit(prompt, num_logprobs=3, **options)
        [tokens], plain = answers([request]), engine.submit(prompt, **options)
        assert answers([plain]) == [tokens]
        assert plain.logprobs == []
        with torch.no_grad():
            wanted = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].log_softmax(-1)
        for token, found, row in zip(request.tokens, request.logprobs, wanted, strict=True):
            np.testing.assert_allclose(found.logprob, row[token], atol=1e-4)
            assert [one for one, _ in found.top] == row.topk(3).indices.tolist()
        with pytest.raises(ValueError, match="num_logprobs=-1: must be at least 0"):
            engine.submit(prompt, num_logprobs=-1)


def test_done_callbacks(model):
    """Each is called once, when the answer ends, or at once if it has ended."""
    ended = []
    with Engine(model, "f32", **ROOM) as engine:
        with held(engine):
            request = engine.submit([5, 6], max_new_tokens=2)
            request.add_done_callback(lambda _: 1 / 0)  # an error of its own ends nothing
            request.add_done_callback(ended.append)
            assert ended == []
        request.result(LONG)
        until(lambda: ended == [request])
    request.add_done_callback(ended.append)
    assert ended == [request] * 2


def tokenizer_of(size):
    """Return a tokenizer whose tokens are characters."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(33 + i): i for i in range(size)}, unk_token="!"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="!")


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_p": 0.5, "typical_p": 0.9, "min_p": 0.01},
        {"do_sample": True, "temperature": 3.0, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
        {"no_repeat_ngram_size": 1, "repetition_penalty": 1.3},
        {"min_new_tokens": 4, "eos_token_id": [5, *range(40, 90)]},
        {"eos_token_id": [*range(40, 97)], "pad_token_id": 0},
        {"bad_words_ids": [[7], [9, 10]], "suppress_tokens": [*range(50, 90)], "begin_suppress_tokens": [11]},
        {"eos_token_id": 3, "sequence_bias": {(12,): 5.0}, "exponential_decay_length_penalty": (2, 1.5)},
        {"max_length": 20, "max_new_tokens": None, "renormalize_logits": True},
        {"stop_strings": [chr(33 + i) for i in range(40, 97)] + ["ab"], "tokenizer": tokenizer_of},
        {"generation_config": {"stop_strings": ["a"], "max_new_tokens": 9}, "tokenizer": tokenizer_of},
        {"generation_config": {"max_new_tokens": 3, "do_sample": True, "top_k": 5}, "max_new_tokens": None},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) + 1) % 97, 4]},
        {"max_time": 1e-9},
        {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    ],
)
def test_ways_of_generate(model, options):
    """Each way that an engine claims, beside ``generate`` alone; others share the passes."""
    given = {"max_new_tokens": 8, **options}
    if "tokenizer" in given:
        given["tokenizer"] = tokenizer_of(97)
    if "generation_config" in given:
        given["generation_config"] = transformers.GenerationConfig(**given["generation_config"])
    given = {name: value for name, value in given.items() if value is not None}
    prompts = prompts_of([5, 9, 3])
    with Engine(model, "f32", **ROOM) as engine:
        requests = [engine.submit(prompt, seed=i, **given) for i, prompt in enumerate(prompts)]
        requests.append(engine.submit(prompts[0], max_new_tokens=8))
        *texts, _ = answers(requests)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        torch.manual_seed(i)
        tokens = torch.tensor([prompt])
        cache = {"past_key_values": HFCache(model.config, "f32"), "attention_mask": torch.ones_like(tokens)}
        assert text == model.generate(tokens, **cache, **given)[0].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"generation_config": transformers.GenerationConfig()},
        {"generation_config": transformers.GenerationConfig(stop_strings=["a"])},
        {"stop_strings": None},
    ],
)
def test_stop_strings_of_the_models_own(model, monkeypatch, options):
    """They count unless a request has others or None, and need the tokenizer as well."""
    monkeypatch.setattr(model.generation_config, "stop_strings", [chr(33 + i) for i in range(40, 97)])
    [prompt], tokenizer = prompts_of([12]), tokenizer_of(97)
    with Engine(model, "f32", **ROOM) as engine:
        text = engine.submit(prompt, max_new_tokens=8, tokenizer=tokenizer, **options).result(LONG)[0].tolist()
        with pytest.raises(ValueError, match=r"stop_strings=.*: give the model's tokenizer"):
            engine.submit(prompt)
    assert text == alone(model, prompt, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("prompt_tokens", [512, 314])  # with 314, a piece of a prompt has one token
def test_selected_rows(prompt_tokens, monkeypatch):
    """Texts that select rows share no pass with others, and select what they do alone."""
    monkeypatch.setattr(selecting, "SELECT_FROM", 310)
    config = transformers.LlamaConfig(**BASE | {"head_dim": 32, "initializer_range": 0.1})
    model, prompts = make(config), prompts_of([300, 305, 20, 315])
    with Engine(model, "f32", select=16, prompt_tokens=prompt_tokens, **ROOM) as engine:
        texts = answers([engine.submit(prompt, max_new_tokens=20) for prompt in prompts])
    model.set_attn_implementation("kvcache")
    for prompt, text in zip(prompts, texts, strict=True):
        cache = HFCache(config, "f32", select=16)
        want = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=20)
        assert text == want[0].tolist()
        assert len(prompt) < 100 or cache.stats()["calls"]["select"] > 0


def test_prefix_of_the_user_and_tenants(model):
    cache = HFCache.make_kv_cache(model.config, "f32", block_size=4, capacity=4096)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model")
    [prompt] = prompts_of([30])
    tenant, other = prefix.tenant(b"a"), prefix.tenant(b"b")
    with Engine(model, prefix=prefix) as engine:
        requests = []
        for owner in (None, tenant, other, tenant):
            requests.append(engine.submit(prompt, tenant=owner, max_new_tokens=2))
            requests[-1].result(LONG)
        assert [request.num_matched for request in requests] == [0, 0, 0, 29]
        with pytest.raises(ValueError, match=r"tenant is .*: give what tenant"):
            engine.submit(prompt, tenant=kvcache.PrefixCache(HFCache.make_kv_cache(model.config), fingerprint="b"))
    assert prefix.lookup(prompt) == 30  # the cache is its user's, and goes on
    assert alone(model, prompt) == model.generate(
        torch.tensor([prompt]), past_key_values=HFCache(model.config, prefix=prefix), max_new_tokens=8
    )[0].tolist()  # fmt: skip


def test_prompts_that_come_together_are_computed_once(model):
    """A prompt waits while the beginning that it shares is fed for another one."""
    system = prompts_of([200])[0]
    prompts = [[*system, i] for i in range(6)]
    with Engine(model, "f32", prompt_tokens=32, block_size=16, **ROOM) as engine:
        requests = [engine.submit(prompt, max_new_tokens=4) for prompt in prompts]
        texts = answers(requests)
    assert sum(len(one.prompt) - one.num_matched for one in requests) <= 201 + 5 * 17
    assert texts == [alone(model, prompt, max_new_tokens=4) for prompt in prompts]


def test_a_short_prompt_overtakes_a_long_one(model):
    long, short = prompts_of([2000, 10])
    ends = []

    def note(ids, scores):
        ends.append(ids.shape[1])
        return scores

    with Engine(model, "f32", prompt_tokens=32, **ROOM) as engine:
        with held(engine):
            requests = [engine.submit(one, max_new_tokens=1, logits_processor=[note]) for one in (long, short)]
        answers(requests)
    assert ends == [10, 2000]


# ---- where an answer ends, and who gets it


def test_reasons_to_end(model):
    [prompt] = prompts_of([12])
    text = alone(model, prompt)
    with Engine(model, "f32", **ROOM) as engine:
        at_most = engine.submit(prompt, max_new_tokens=8)
        stopped = engine.submit(prompt, max_new_tokens=8, eos_token_id=text[14])
        criteria = [lambda ids, scores, **options: ids.shape[1] == 15]
        by_criterion = engine.submit(prompt, max_new_tokens=8, stopping_criteria=criteria)
        assert answers([at_most, stopped, by_criterion])[0] == text
    assert (at_most.finish_reason, stopped.finish_reason, by_criterion.finish_reason) == ("length", "stop", "stop")
    assert stopped.tokens == alone(model, prompt, eos_token_id=text[14])[12:]
    assert len(by_criterion.tokens) == 3


def test_iterating_streaming_and_asyncio(model):
    [prompt] = prompts_of([12])
    want = alone(model, prompt)[12:]

    class Streamer(transformers.generation.streamers.BaseStreamer):
        got, has_ended = [], False

        def put(self, value):
            self.got += value.tolist()

        def end(self):
            self.has_ended = True

    async def take(request):
        return [token async for token in request]

    async def take_both(engine):
        requests = [engine.submit(prompt, max_new_tokens=8) for _ in range(2)]
        return await asyncio.gather(take(requests[0]), take(requests[1]), take(requests[0]))

    with Engine(model, "f32", **ROOM) as engine:
        streamer = Streamer()
        request = engine.submit(torch.tensor([prompt]), streamer=streamer, max_new_tokens=8)
        assert [*request] == [*request] == request.tokens == want
        assert (streamer.got, streamer.has_ended) == ([prompt, *want], True)  # as from generate
        assert asyncio.run(take_both(engine)) == [want] * 3
        with held(engine), pytest.raises(TimeoutError, match=r"timeout=0\.01: the answer has 0 tokens, and goes on"):
            engine.submit(prompt).result(0.01)


def test_the_prompt_is_its_own(model):
    """Its user may write other tokens to the tensor or the array at once; any integers in any order are taken."""
    prompt, want = [5, 6, 7, 8], alone(model, [5, 6, 7, 8])
    given = [torch.tensor([prompt]), np.array(prompt), np.array(prompt, np.uint16), np.array(prompt, ">i8")]
    given += [np.array(prompt[::-1])[::-1], np.repeat(prompt, 2)[::2]]
    with Engine(model, "f32", **ROOM) as engine:
        with held(engine):
            requests = [engine.submit(ids, max_new_tokens=8) for ids in given]
            for ids in given:
                ids[:] = 9
        assert answers(requests) == [want] * len(given)


def test_an_event_loop_that_closes_meanwhile(model):
    """Its task gets no more tokens. The request and others go on."""

    class Closing(asyncio.SelectorEventLoop):
        def is_closed(self):  # other threads ask just before it closes
            return threading.current_thread() is threading.main_thread() and super().is_closed()

    prompts = prompts_of([12, 5])
    with Engine(model, "f32", **ROOM) as engine:
        loop, reached, go_on = Closing(), threading.Event(), threading.Event()

        def hold(ids, scores):
            if ids.shape[1] > len(prompts[0]):
                reached.set()
                go_on.wait(LONG)
            return scores

        request = engine.submit(prompts[0], max_new_tokens=8, logits_processor=[hold])
        iterator = aiter(request)
        loop.run_until_complete(anext(iterator))
        assert reached.wait(LONG)
        other = engine.submit(prompts[1], max_new_tokens=8)
        loop.close()
        go_on.set()
        assert answers([request, other]) == [alone(model, prompt) for prompt in prompts]
        assert engine.is_alive


def test_cancelled(model):
    """A cancelled request ends before its most tokens, and others go on; its rows can be evicted at once."""
    prompts = prompts_of([12, 20, 5])
    with Engine(model, "f32", capacity=512, block_size=4) as engine:
        is_cancelled = threading.Event()

        def wait(ids, scores):
            assert ids.shape[1] < 400 or is_cancelled.wait(LONG)
            return scores

        cancelled = engine.submit(prompts[0], max_new_tokens=400, logits_processor=[wait])
        others = [engine.submit(prompt, max_new_tokens=8) for prompt in prompts[1:]]
        next(iter(cancelled))
        cancelled.cancel()
        cancelled.cancel()
        is_cancelled.set()
        assert len(cancelled.result(LONG)[0]) < 412
        assert cancelled.finish_reason == "cancelled"
        assert answers(others) == [alone(model, prompt) for prompt in prompts[1:]]
        cancelled.cancel()
        assert engine.submit(prompts_of([500], seed=9)[0], max_new_tokens=2).result(LONG).shape == (1, 502)


# ---- errors


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_request_that_fails_fails_alone(kind, monkeypatch):
    """Its processor, its streamer, or the model in a pass that has its tokens."""
    model, prompts = model_of(kind), prompts_of([12, 30, 7, 9])
    forward = type(model).forward

    @functools.wraps(forward)
    def fail(self, input_ids=None, **inputs):
        if (input_ids == 96).any():
            raise ZeroDivisionError("the model's own")
        return forward(self, input_ids=input_ids, **inputs)

    class Broken(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            raise ZeroDivisionError("a streamer's own")

        def end(self):
            raise ZeroDivisionError("a streamer's end")

    prompts = [[token if token < 96 else 95 for token in prompt] for prompt in prompts]
    options = {"max_new_tokens": 8, "suppress_tokens": [96]}
    with Engine(model, "f32", prompt_tokens=16, **ROOM) as engine:
        monkeypatch.setattr(type(model), "forward", fail)
        requests = [engine.submit(prompt, **options) for prompt in prompts]
        bad = [
            engine.submit([*prompts[0][:5], 96, 3], max_new_tokens=8),
            engine.submit(prompts[1], max_new_tokens=8, logits_processor=failing(at=33)),
            engine.submit(prompts[2], max_new_tokens=8, streamer=Broken()),
        ]
        texts = answers(requests)
        for request in bad:
            with pytest.raises(ZeroDivisionError, match="own"):
                request.result(LONG)
            with pytest.raises(ZeroDivisionError, match="own"):
                list(request)
            assert request.finish_reason == "error"
        assert engine.stats()["running"] == 0
        again = answers([engine.submit(prompt, **options) for prompt in prompts])
    monkeypatch.undo()
    assert texts == again == [alone(model, prompt, **options) for prompt in prompts]


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_too_little_memory_for_all(kind):
    """If texts do not fit beside each other, younger ones wait, and get their tokens. One that never fits fails."""
    model, prompts = model_of(kind), prompts_of([30, 31, 32, 33, 34])
    with Engine(model, "f32", prompt_tokens=16, capacity=96, block_size=4) as engine:
        with held(engine):
            requests = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
        texts = answers(requests)
        assert engine.stats()["put_back"] > 0
        with pytest.raises(CacheFullError):
            engine.submit(prompts[0], max_new_tokens=200).result(LONG)
        with pytest.raises(ValueError, match="input_ids has 97 tokens, and the cache a capacity of 96"):
            engine.submit([1] * 97, max_new_tokens=1)
    model.set_attn_implementation("kvcache")
    assert texts == [alone(model, prompt, max_new_tokens=20) for prompt in prompts]


def test_who_runs_when_memory_is_short(model):
    """A put-back request holds up nobody whose rows fit. It begins once the older one has ended, however many come."""
    long, big, *shorts = prompts_of([20, 60, *[12] * 5])
    requests, num_big, waited, steps = [], [], [], [0]

    def come(ids, scores):
        """Submit short requests when the big one was put back, and each again at its end, until the big one goes on."""
        text = ids[0].tolist()
        steps[0] += text[: len(long)] == long
        if engine.stats()["put_back"]:
            num_big.append(len(requests[1].tokens))
            again = shorts if len(requests) == 2 else [text[:12]] if len(text) == 13 else []
            if num_big[0] == num_big[-1] and len(requests) < 400:
                options = {"max_new_tokens": 2, "logits_processor": [note(steps[0]), come]}
                requests.extend(engine.submit(prompt, **options) for prompt in again)
        return scores

    def note(begin):
        def process(ids, scores):
            waited.append(steps[0] - begin)
            return scores

        return process

    with Engine(model, "f32", capacity=96, block_size=4) as engine:
        with held(engine):
            requests.append(engine.submit(long, max_new_tokens=50, logits_processor=[come]))
            requests.append(engine.submit(big, max_new_tokens=20))
        texts = answers(requests[:2])
        assert 10 < len(requests) < 400
        assert max(waited[: 2 * len(shorts)]) < 10
        answers(requests)
    model.set_attn_implementation("kvcache")
    assert texts == [alone(model, long, max_new_tokens=50), alone(model, big, max_new_tokens=20)]


@pytest.mark.parametrize("max_running", [1, 3])
def test_no_more_than_max_running(model, max_running):
    """They run in the order of their arrival, also if prompts begin alike."""
    prompts, running, first = prompts_of([5, 40, 40, 5, 9, 30, 2]), [], []

    def note(ids, scores):
        running.append(engine.stats()["running"])
        if not first or first[-1] != ids[0, 0]:
            first.append(int(ids[0, 0]))
        return scores

    with Engine(model, "f32", max_running=max_running, block_size=4, **ROOM) as engine:
        with held(engine):
            requests = [engine.submit(prompt, max_new_tokens=4, logits_processor=[note]) for prompt in prompts]
        texts = answers(requests)
    assert max(running) == max_running
    assert max_running > 1 or first == [prompt[0] for prompt in prompts]
    model.set_attn_implementation("kvcache")
    assert texts == [alone(model, prompt, max_new_tokens=4) for prompt in prompts]


def test_limits_and_the_end(model):
    [prompt] = prompts_of([12])
    engine = Engine(model, "f32", max_waiting=2, **ROOM)
    closing = threading.Thread(target=engine.close)

    def has_begun_to_close():
        try:
            engine.submit(prompt)
        except queue.Full:
            return False
        except ValueError:
            return True

    with held(engine):
        waiting = [engine.submit(prompt) for _ in range(2)]
        with pytest.raises(queue.Full, match="max_waiting=2: as many requests wait"):
            engine.submit(prompt)
        assert engine.is_alive
        closing.start()
        until(has_begun_to_close)
    closing.join()
    engine.close()
    assert not engine.is_alive
    for request in waiting:
        with pytest.raises(RuntimeError, match="the engine is closed"):
            request.result(LONG)
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.submit(prompt)


@pytest.mark.parametrize(
    ("given", "options", "error", "match"),
    [
        ([], {}, ValueError, r"input_ids has the shape \[1, 0\]"),
        ([[1, 2], [3, 4]], {}, ValueError, r"input_ids has the shape \[2, 2\]"),
        ([1.5], {}, TypeError, r"input_ids has the type torch\.float32"),
        ("hello", {}, TypeError, "input_ids is 'hello': tokens are needed"),
        ({}, {}, TypeError, "input_ids is {}: tokens are needed"),
        ([1], {"seed": "a"}, TypeError, "seed"),
        ([1], {"streamer": 3}, TypeError, r"streamer is a int: give one with put\(\) and end\(\)"),
        ([1], {"attention_mask": [[1]]}, TypeError, "attention_mask is a list: leave it out"),
        ([1], {"past_key_values": 1}, NotSupportedError, "past_key_values: an engine does not generate so"),
        ([1], {"use_cache": False}, NotSupportedError, "use_cache: an engine does not generate so"),
        ([1], {"output_scores": True}, NotSupportedError, "output_scores: an engine does not generate so"),
        ([1, 2], {"attention_mask": torch.ones(1, 3)}, ValueError, r"attention_mask has the shape \[1, 3\]"),
        ([1], {"generation_config": {"max_new_tokens": 3}}, TypeError, "generation_config is a dict"),
        ([1, 97], {}, ValueError, "input_ids has the token 97: tokens are from 0 to 96"),
        ([-1], {}, ValueError, "input_ids has the token -1"),
        ([1], {"num_beams": 2}, NotSupportedError, "the mode 'beam_search'"),
        ([1], {"num_return_sequences": 2, "do_sample": True}, NotSupportedError, "num_return_sequences=2"),
        ([1], {"prompt_lookup_num_tokens": 2}, NotSupportedError, "the mode 'assisted_generation'"),
        ([1], {"assistant_model": "x"}, NotSupportedError, "assistant_model: an engine does not generate so"),
        ([1], {"guidance_scale": 1.5}, NotSupportedError, r"guidance_scale=1\.5"),
        ([1], {"position_ids": torch.tensor([[3]])}, NotSupportedError, "attention_mask, position_ids"),
        ([1, 2], {"attention_mask": torch.tensor([[0, 1]])}, NotSupportedError, "attention_mask, position_ids"),
        ([1], {"inputs_embeds": torch.zeros(1, 1, 64)}, (NotSupportedError, ValueError), ""),
        ([1], {"stop_strings": "a"}, ValueError, "stop_strings='a': give the model's tokenizer"),
        ([1], {"max_new_token": 3}, ValueError, "max_new_token"),
        ([1], {"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
    ],
)
def test_bad_requests(model, given, options, error, match):
    with Engine(model, "f32", **ROOM) as engine:
        with pytest.raises(error, match=match):
            engine.submit(given, **options)
        assert engine.submit([1, 2], max_new_tokens=2).result(LONG).shape == (1, 4)


def test_what_ends_a_thread_ends_one_request(model):
    """SystemExit of a processor, a streamer and its end; its user's thread gets another error."""

    class Exiting(transformers.generation.streamers.BaseStreamer):
        def __init__(self, at):
            self.at = at

        def put(self, value):
            if self.at == "put":
                raise SystemExit("a streamer's own")

        def end(self):
            raise SystemExit("a streamer's own")

    def leave(ids, scores):
        raise SystemExit("a processor's own")

    [prompt] = prompts_of([12])
    with Engine(model, "f32", **ROOM) as engine:
        bad = [engine.submit(prompt, max_new_tokens=3, streamer=Exiting(at)) for at in ("put", "end")]
        bad.append(engine.submit(prompt, logits_processor=[leave]))
        other = engine.submit(prompt, max_new_tokens=8)
        for request in bad:
            for _ in range(20):
                with pytest.raises(RuntimeError, match=r"the request has failed: SystemExit\(.*own") as error:
                    request.result(LONG)
            assert len(error.traceback) < 20
        assert other.result(LONG)[0].tolist() == alone(model, prompt)


def test_closed_from_within(model):
    """A streamer may ask for more, cancel, and close the engine."""

    class Closing(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            if value.numel() == 1:
                asked.append(engine.submit(prompt))
                asked[0].cancel()
                engine.close()

        def end(self):
            pass

    asked, [prompt] = [], prompts_of([12])
    engine = Engine(model, "f32", **ROOM)
    request = engine.submit(prompt, streamer=Closing())
    with pytest.raises(RuntimeError, match="the engine is closed"):
        request.result(LONG)
    engine.close()
    assert "closed" in repr(engine.prefix.cache)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        asked[0].result(LONG)


def test_closed_from_within_it_is_not_kept(model):
    """Nobody has to close it again: the end of the program forgets it."""

    def close_one():
        engine = Engine(model, "f32", **ROOM)

        def close(ids, scores):
            engine.close()
            return scores

        engine.submit([1], logits_processor=[close])
        engine._thread.join(LONG)
        return weakref.ref(engine)

    kept = close_one()
    gc.collect()
    assert kept() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_of_fork(model):
    """It cannot ask, and ends; the engine of its parent goes on."""
    [prompt] = prompts_of([12])
    with Engine(model, "f32", **ROOM) as engine:
        slow = engine.submit(prompt, max_new_tokens=50, logits_processor=[Slow()])
        child = os.fork()
        if not child:
            try:
                engine.submit(prompt)
            except ValueError as error:
                engine.close()
                os._exit(0 if "child of fork" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert len(slow.result(LONG)[0]) == 62


@pytest.mark.parametrize("other", ["generate", "engine"])
def test_others_on_the_same_prefix(model, other):
    """`generate` in another thread, or another engine: passes take turns, and texts stay right."""
    prefix = prefix_for(model, block_size=4)
    prompts, texts = prompts_of([12, 20, 5, 30]), []

    def ask(one):
        for prompt in prompts:
            if one is None:
                cache = HFCache(model.config, prefix=prefix)
                texts.append(model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=8))
                cache.release(texts[-1])
            else:
                texts.append(one.submit(prompt, max_new_tokens=8).result(LONG))

    with Engine(model, prefix=prefix) as engine, contextlib.ExitStack() as stack:
        second = stack.enter_context(Engine(model, prefix=prefix)) if other == "engine" else None
        threads = [threading.Thread(target=ask, args=(one,)) for one in (engine, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    wanted = [alone(model, prompt) for prompt in prompts]
    assert sorted(text[0].tolist() for text in texts) == sorted(2 * wanted)


def test_tenants_wait_for_their_own_prompts_alone(model):
    [system] = prompts_of([100])
    with Engine(model, "f32", prompt_tokens=32, block_size=16, **ROOM) as engine:
        tenants = [engine.prefix.tenant(salt) for salt in (b"a", b"b")]
        requests = [
            engine.submit([*system, i], tenant=tenant, max_new_tokens=1) for tenant in tenants for i in range(3)
        ]
        answers(requests)
        assert [request.num_matched > 90 for request in requests] == [False, True, True] * 2


def test_models_whose_texts_cannot_share_a_pass():
    bloom = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=97)
    jamba, training = model_of("jamba"), make(CONFIGS["llama"]()).train()
    before = training.config._attn_implementation
    for model, error, match in [
        (make(bloom), NotSupportedError, "cannot share a pass"),
        (jamba, NotSupportedError, "by single tokens only"),
        (training, ValueError, "in training mode"),
        ("gpt2", TypeError, "model is a str: give a model"),
    ]:
        with pytest.raises(error, match=match):
            Engine(model, "f32", **ROOM)
    assert training.config._attn_implementation == before


# ---- random clients


def play(engine, model, clients, requests, seed):
    """Play clients, each with so many requests, which it reads, cancels or fails; return what was wrong."""
    pool, wrong, wanted, finished = prompts_of([40, 41, 42]), [], {}, []

    def want(prompt, most):
        key = (*prompt, most)
        if key not in wanted:
            wanted[key] = alone(model, prompt, max_new_tokens=most)
        return wanted[key]

    def submit(prompt, **options):
        while True:
            with contextlib.suppress(queue.Full):
                return engine.submit(prompt, **options)
            time.sleep(0.001)

    def client(rng):
        for _ in range(requests):
            prompt = [*rng.choice(pool)[: rng.randint(1, 40)], *(rng.randint(1, 96) for _ in range(rng.randint(0, 9)))]
            most, what = rng.randint(1, 12), rng.random()
            options = {"logits_processor": failing(at=len(prompt) + 1)} if what < 0.1 else {}
            try:
                request = submit(prompt, max_new_tokens=most, **options)
                if what > 0.8:
                    next(iter(request), None)
                    request.cancel()
                text = request.result(LONG)[0].tolist()
            except ZeroDivisionError:
                if not options:
                    wrong.append("failed for another one")
                continue
            except Exception as error:
                wrong.append(repr(error))
                continue
            if not options:
                finished.append((prompt, most, text, request.finish_reason))

    threads = [threading.Thread(target=client, args=(random.Random(seed + i),)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, most, text, reason in random.Random(seed).sample(finished, min(len(finished), 50)):
        full = want(prompt, most)
        if full[: len(text)] != text or (reason == "length") != (len(full) == len(text)):
            wrong.append((prompt, most, text, reason))
    return wrong, len(finished)


@pytest.mark.parametrize(
    ("kind", "requests"),
    [("lfm2", 4), *(pytest.param(kind, 100, marks=pytest.mark.slow) for kind in ("llama", "lfm2"))],
)
def test_random_clients(kind, requests):
    """No text is wrong, and nothing is left behind: all memory can be evicted."""
    model = model_of(kind)
    with Engine(model, "f32", prompt_tokens=16, capacity=400, block_size=4, max_waiting=6) as engine:
        wrong, number = play(engine, model, 8, requests, seed=5)
        assert not wrong
        assert number > 4 * requests
        stats = engine.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert engine.submit([1] * 380, max_new_tokens=1).result(LONG).shape == (1, 381)


def test_an_attention_that_was_changed_is_named():
    model = make(CONFIGS["llama"]())
    with Engine(model, **ROOM) as engine:
        model.set_attn_implementation("eager")
        with pytest.raises(NotSupportedError, match=r"attention is not 'kvcache'.*set_attn_implementation"):
            engine.submit([5, 6, 7], max_new_tokens=2).result(LONG)
