"""kvcache.server.speech: thoughts, calls of tools, and what is said, however the text comes in pieces."""

import random

import pytest

pytest.importorskip("starlette")

from kvcache.server.speech import HERMES, LLAMA, MISTRAL, Call, Speech, TemplatedSpeech, format_of

TOOLS = ["weather", "time"]
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
CASES = [  # format, whether the template has opened thoughts, the answer, and its parts
    (None, False, "Just text.", [("content", "Just text.")]),
    (None, False, "  <think>\nHm.\n</think>\n\nYes.", [("reasoning_content", "Hm."), ("content", "Yes.")]),
    (None, True, "Hm.</think>Yes.", [("reasoning_content", "Hm."), ("content", "Yes.")]),
    (None, True, "Hm, without an end", [("reasoning_content", "Hm, without an end")]),
    (None, False, "a <think> b", [("content", "a <think> b")]),
    (HERMES, False, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", [
        ("content", "Let me see."), ("weather", "Köln"),
    ]),
    (HERMES, False, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [("weather", "Köln")] * 2),
    (HERMES, False, "<tool_call>{no JSON</tool_call>", [("content", "<tool_call>{no JSON</tool_call>")]),
    (HERMES, False, f"<tool_call>{CALL.replace('weather', 'none')}</tool_call>", [
        ("content", f"<tool_call>{CALL.replace('weather', 'none')}</tool_call>"),
    ]),
    (HERMES, False, "Write \n<tool_call> </tool_call> .", [("content", "Write \n<tool_call> </tool_call> .")]),
    *(
        (HERMES, False, f"<tool_call>{one}</tool_call>", [("content", f"<tool_call>{one}</tool_call>")])
        for one in (
            CALL.replace('"Köln"', "1e400"), CALL.replace('"Köln"', "NaN"),
            '{"name": "weather", "arguments": "' + 100_000 * "[" + '"}', '"weather"', '{"name": ["weather"]}',
        )
    ),
    (HERMES, False, '<tool_call>{"name": "weather"', [("content", '<tool_call>{"name": "weather"')]),
    (HERMES, False, f"<tool_call>{CALL.replace('Köln', chr(92) + 'ud83d')}</tool_call>", [("weather", "\ud83d")]),
    (HERMES, False, "1 < 2 <tool", [("content", "1 < 2 <tool")]),
    (HERMES, True, f"Hm.</think>\n<tool_call>{CALL}</tool_call>", [("reasoning_content", "Hm."), ("weather", "Köln")]),
    (MISTRAL, False, f"[TOOL_CALLS][{CALL}, {CALL}]", [("weather", "Köln")] * 2),
    (MISTRAL, False, '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}', [("weather", "Köln")]),
    (MISTRAL, False, '[TOOL_CALLS]weather{"city": "Köln"}[TOOL_CALLS]weather[CALL_ID]7[ARGS]{"city": "Köln"}', [
        ("weather", "Köln"), ("weather", "Köln"),
    ]),
    (LLAMA, False, CALL.replace("arguments", "parameters"), [("weather", "Köln")]),
    (LLAMA, False, f"<|python_tag|>{CALL.replace('arguments', 'parameters')}", [("weather", "Köln")]),
    (LLAMA, False, '{"a": 1}', [("content", '{"a": 1}')]),
    (LLAMA, False, "The {brace}.", [("content", "The {brace}.")]),
]  # fmt: skip


def joined(parts):
    """Return parts with text of one kind in one piece, and each call as its name and its city."""
    import json

    found = []
    for part in parts:
        if isinstance(part, Call):
            part.arguments.encode()  # also half of a character, which JSON escapes
            found.append((part.name, json.loads(part.arguments)["city"]))
        elif found and found[-1][0] == part[0] and found[-1][0] not in TOOLS:
            found[-1] = (part[0], found[-1][1] + part[1])
        else:
            found.append(part)
    return found


@pytest.mark.parametrize("case", range(len(CASES)))
def test_parts(case):
    """They are the same however the text is cut, and nothing is said that turns out to be a part of a marker."""
    form, thinks, text, wanted = CASES[case]
    choose = random.Random(case)
    for cut in [len(text), 1, *[0] * 20]:
        speech, parts, at = Speech(form, TOOLS, thinks), [], 0
        while at < len(text):
            size = cut or choose.randrange(1, 9)
            parts += speech.add(text[at : at + size])
            at += size
        parts += speech.end()
        assert joined(parts) == wanted
        assert speech.num_calls == sum(isinstance(part, Call) for part in parts)


GOOD, LATE = '<call>{"name": "weather", "arguments": {"city": "Köln"}}</call>', "<hm>So.</hm>"


@pytest.mark.parametrize(
    "text",
    [
        '<call>{"name": "weather", arguments: </call>',
        '<call>{"name": "weather", <eos>',
        '<call>{"x": 1}</call>',
        '<call>{"name": "other"}</call>',
        '<call>[{"name": "weather"}, 1]</call>',
        "a <cal",
    ],
)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_what_is_no_call_of_a_response_template_is_text(text, size):
    """Also half of a call; what comes before and after is read as ever."""
    parsing = pytest.importorskip("transformers.utils.chat_parsing.response_parser")
    template = {
        "start_anchor": "@@",
        "fields": {
            "thinking": {"open": "<hm>", "close": "</hm>"},
            "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"},
            "content": {"optional": True},
        },
    }
    for before, after, tools in (("", "", TOOLS), (f"{LATE}I <", f"; {GOOD}{LATE}", TOOLS), ("I ", f" {GOOD}", [])):
        after = after if text.endswith("</call>") else ""
        speech = TemplatedSpeech(lambda text: parsing.ResponseParser(template, prefix=text), "", tools, "<eos>")
        whole, said = before + text + after, text.removesuffix("<eos>")
        wanted = [("content", (before + said + after).replace(LATE, ""))]
        parts = [part for at in range(0, len(whole), size) for part in speech.add(whole[at : at + size])] + speech.end()
        if tools and before:
            wanted = [("reasoning_content", "So."), ("content", f"I <{said}{'; ' if after else ''}")]
            wanted += [("weather", "Köln"), ("reasoning_content", "So.")] if after else []
        assert joined(parts) == wanted
        assert size < 1000 or len(parts) <= len(wanted) + 1


def test_without_tools_calls_are_text():
    speech = Speech(HERMES, [])
    text = f"<tool_call>{CALL}</tool_call>"
    assert joined(speech.add(text) + speech.end()) == [("content", text)]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\n{'name': ...}</tool_call>", HERMES),
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ('{"name": function name, "parameters": dictionary}', LLAMA),
        ("{{ messages }}", None),
    ],
)
def test_formats_by_template(template, form):
    assert format_of(template) is form
