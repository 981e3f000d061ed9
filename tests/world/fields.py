"""Write C that notes which fields of public structs a program gives to public functions: 0, not 0, and two together.

The structs and functions are read from the headers, so that no new field can be forgotten. Each function that takes a
constant public struct gets a wrapper of its name, which notes the fields of a call that succeeds. A program that is
compiled with it, and run with $FIELDS set, prints a line for each two fields of a struct: their names, and a bit for
each of 00, 01, 10 and 11 that was given. A field beside itself is 00 or 11.
"""

import re
from itertools import combinations_with_replacement

from support.compiling import HEADERS

TEXT = re.sub(r"/\*.*?\*/", "", "".join(header.read_text() for header in HEADERS), flags=re.S)
BODIES = dict(re.findall(r"typedef struct (kvc_\w+) \{(.*?)\n\} \1;", TEXT, re.S))

HEAD = """
#include <stdlib.h>
#include <string.h>
#include "kvcache_more.h"
#include "kvcache_prefix.h"
extern unsigned char *given_fields; /* for each two fields, their bits; NULL: nothing is noted */
enum { NUM_PAIRS = %d };
static inline void note_pairs(int first, const unsigned char *is_set, int num) {
    for (int i = 0; i < num; i++)
        for (int j = i; j < num; j++, first++)
            given_fields[first] = (unsigned char)(given_fields[first] | 1 << (2 * is_set[i] + is_set[j]));
}
static inline unsigned char is_set(const void *field, size_t size) {
    static const char zeros[64];
    return memcmp(field, zeros, size) != 0;
}
"""

MAIN = """
#define _DEFAULT_SOURCE
#include "fields.h"
#include <stdio.h>
#include <sys/mman.h>
unsigned char *given_fields;
static const char *const names[] = {%s};
static void print_fields(void) {
    for (int i = 0; i < NUM_PAIRS; i++) printf("field %%s %%d\\n", names[i], given_fields[i]);
}
__attribute__((constructor)) static void note_fields(void) { /* of children, too */
    if (!getenv("FIELDS")) return;
    given_fields = mmap(NULL, NUM_PAIRS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    atexit(print_fields);
}
"""


def declared_in(struct):
    """The fields of a struct with their types; those of a struct in it by their full names."""
    for line in filter(str.strip, BODIES[struct].split(";")):
        if function := re.search(r"\(\*(\w+)\)", line):
            yield function[1], "function"
            continue
        kind, *names = re.match(r"\s*((?:const |struct |volatile )*\w+)\s+(.*)", line, re.S).groups()
        for name in re.findall(r"\*?\w+", re.sub(r"\[\w+\]", "", names[0])):
            if kind in BODIES:
                yield from ((f"{name}.{inner}", what) for inner, what in declared_in(kind))
            else:
                yield name.lstrip("*"), kind + " *" * name.startswith("*")


def fields_of(struct):
    return [name for name, _ in declared_in(struct)]


def functions():
    """The name, the parameters and the public structs among them of each function that takes one."""
    for name, parameters in re.findall(r"^KVC_API kvc_status (kvc_\w+)\(([^;]*)\);", TEXT, re.M):
        parameters = [" ".join(parameter.split()) for parameter in parameters.split(",")]
        found = [re.match(r"const (kvc_\w+) \*(\w+)$", parameter) for parameter in parameters]
        if given := [(one[1], one[2]) for one in found if one and one[1] in BODIES]:
            yield name, parameters, given


def note(struct):
    """A function that notes the fields of a struct, and of the structs to which it points."""
    kinds = dict(declared_in(struct))
    yield f"static inline void note_{struct}(const {struct} *x) {{"
    yield f"    const unsigned char set[] = {{{', '.join(f'is_set(&x->{name}, sizeof x->{name})' for name in kinds)}}};"
    yield f"    note_pairs(FIRST_{struct}, set, {len(kinds)});"
    for name, kind in kinds.items():
        inner = re.match(r"const (?:struct )?(kvc_\w+) \*", kind)
        if not inner or inner[1] not in BODIES:
            continue
        size = next((size for size in (f"{name}_size", f"{name.rstrip('s')}_size") if size in kinds), None)
        if size:
            yield f"    for (int32_t i = 0; i < x->num_{name}; i++)"
            yield f"        note_{inner[1]}((const void *)((const char *)x->{name} + (size_t)i * x->{size}));"
        else:
            yield f"    if (x->{name}) note_{inner[1]}(x->{name});"
    yield "}"


def structs():
    """The structs that functions take, each after those to which it points."""
    names = {}

    def add(struct):
        for _, kind in declared_in(struct):
            inner = re.match(r"const (?:struct )?(kvc_\w+) \*", kind)
            if inner and inner[1] in BODIES:
                add(inner[1])
        names[struct] = None

    for _, _, given in functions():
        for struct, _ in given:
            add(struct)
    return [*names]


def pairs():
    return [(struct, a, b) for struct in structs() for a, b in combinations_with_replacement(fields_of(struct), 2)]


def write(folder):
    """Write fields.h, to be included first, and fields.c, which is returned."""
    first, lines = 0, []
    for struct in structs():
        lines += [f"enum {{ FIRST_{struct} = {first} }};", *note(struct)]
        first += (num := len(fields_of(struct))) * (num + 1) // 2
    for name, parameters, given in functions():
        own = [re.search(r"\w+(?=(\[\w*\])?$)", parameter)[0] for parameter in parameters]
        notes = " ".join(f"if ({argument}) note_{struct}({argument});" for struct, argument in given)
        lines += [
            f"static inline kvc_status noted_{name}({', '.join(parameters)}) {{",
            f"    const kvc_status status = {name}({', '.join(own)});",
            f"    if (!status && given_fields) {{ {notes} }}",
            "    return status;",
            "}",
            f"#define {name} noted_{name}",
        ]
    header, main = folder / "fields.h", folder / "fields.c"
    header.write_text("#pragma once" + HEAD % first + "\n".join(lines) + "\n")
    main.write_text(MAIN % ", ".join(f'"{" ".join(pair)}"' for pair in pairs()))
    return [main]


# ---- what the world does not draw

ONE_VALUE = {  # fields that are never 0, or always, with the reason
    "a call without it is refused, or about nothing": """
        struct_size layer_size num_kv_heads k_dim layers num_layers alloc free num_tokens:kvc_begin_args num_heads
        positions:kvc_chosen num_choices:kvc_chosen width:kvc_chosen width:kvc_choose_args q out chosen:kvc_choose_args
        k:kvc_rows_in rows weights:kvc_weights_args num_queries write size fingerprint:kvc_prefix_config ids""",
    "it must be 0": "policy.reserved rope.reserved",
    "threads change nothing that can be seen": "num_threads:kvc_config",
    "the world tells by it whose call it is": "user:kvc_save_args user:kvc_prefix_config user:kvc_store max_events",
    "its default is the layout of another field": "mask_token_stride seen_token_stride",
    "tests/c/read/test_raw.c": "type raw",
    "tests/c/saved/test_saved.c": "tokens:kvc_load_args",
    "tests/c/prefix/test_names.c": "identity identity_size",
    "tests/c/prefix/test_stores.c": "read:kvc_store write:kvc_store remove",
}

TOGETHER = """
    kvc_layer v_dim value_in_key sketch_bits policy.kind
    kvc_layer share policy.num_sink_tokens policy.max_len policy.resume_window
    kvc_layer rope.kind rope.interleaved rope.first_dim rope.num_freqs rope.inv_freq rope.shift rope.user
    kvc_config block_size allocator
    kvc_begin_args positions seq_ids parents unstored replaced timeout_ms
    kvc_put_args k v k_token_stride k_head_stride k_batch_stride v_batch_stride tokens_per_sequence seq_id
    kvc_put_args first num_tokens v_token_stride v_head_stride seq_id
    kvc_masked begin end
    kvc_plan_args masked masked_size num_masked
    kvc_plan_args max_chosen num_choices select_rows chosen_width precision
    kvc_attend_args prior_out prior_lse
    kvc_choose_args weights weights_token_stride weights_head_stride weights_batch_stride
    kvc_choose_args among among_token_stride among_choice_stride among_batch_stride among_width weights_token_stride
    kvc_choose_args among_width q_token_stride q_head_stride q_batch_stride weights_batch_stride scale
    kvc_choose_args among_width scores_token_stride scores_choice_stride
    kvc_rows_out k v k_head_stride k_row_stride v_head_stride v_row_stride positions num_stored batch
    kvc_dense_args num_rows by_sequence k_batch_stride v_batch_stride
    kvc_dense_args masked masked_size num_masked
    kvc_save_args seq_ids num_sequences tokens num_tokens fingerprint
    kvc_load_args data read user fingerprint seq_ids to_ids num_sequences config
    kvc_prefix_config salt salt_size secret secret_size
    kvc_prefix_config quota reuse_min_tokens state_bytes max_checkpoint_bytes
"""  # fields of a struct that depend on each other: not all pairs of them mean anything, or are drawn


def undrawn(lines):
    """What the lines of a program lack: fields that were never 0, or always, and pairs that were never given."""
    given = {tuple(line.split()[1:4]): int(line.split()[4]) for line in lines if line.startswith("field ")}
    excused = {word for words in ONE_VALUE.values() for word in words.split()}
    together = [line.split() for line in TOGETHER.strip().splitlines()]
    for (struct, a, b), bits in given.items():
        if a == b:
            if bits != 9 and not excused & {a, f"{a}:{struct}"}:
                yield f"{struct}.{a} is never {'0' if bits & 8 else 'anything but 0'}"
            continue
        depend = any(line[0] == struct and {a, b} <= {*line[1:]} for line in together)
        if {given[struct, a, a], given[struct, b, b]} == {9} and bits != 15 and not depend:
            lacking = [f"{n >> 1} and {n & 1}" for n in range(4) if not bits >> n & 1]
            yield f"{struct}.{a} and {b} are never {', '.join(lacking)} (0: 0, 1: not)"
