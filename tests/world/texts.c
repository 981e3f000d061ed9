/* texts.c: see texts.h.  The parent of node 0, the empty text, counts the nodes. */
#define _DEFAULT_SOURCE
#include "texts.h"

#include <string.h>
#include <sys/mman.h>

static struct node {
    int parent, symbol, length, first, next; /* first: of the texts with one more token, linked by next */
} own[MOST_TEXTS], *nodes = own;

static struct node *new_node(void) { return nodes->parent < MOST_TEXTS - 1 ? &nodes[++nodes->parent] : NULL; }

void forget_texts(void) { memset(nodes, 0, ((size_t)nodes->parent + 1) * sizeof *nodes); }

void share_texts(void) { nodes = mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); }

static const int64_t symbol_ids[SYMBOLS] = {0, 1, -1, INT64_MIN};

/* The last symbols have digests: one looks like the bytes of an id, and one has a single bit. */
static int digest_of(int symbol, uint8_t *to) {
    memset(to, 0, KVC_NAME_BYTES);
    if (symbol == SYMBOLS - 2) to[0] = 1;
    if (symbol == SYMBOLS - 1) to[KVC_NAME_BYTES - 1] = 1;
    return symbol >= SYMBOLS - 2;
}

int text_behind(int node, int symbol) {
    for (int i = nodes[node].first; i; i = nodes[i].next)
        if (nodes[i].symbol == symbol) return i;
    struct node *added = new_node();
    if (!added) return 0;
    *added = (struct node){node, symbol, nodes[node].length + 1, 0, nodes[node].first};
    return nodes[node].first = (int)(added - nodes);
}

int text_length(int node) { return nodes[node].length; }

int text_symbol(int node) { return nodes[node].symbol; }

int text_begin(int node, int length) {
    while (nodes[node].length > length) node = nodes[node].parent;
    return node;
}

int text_common(int a, int b) {
    a = text_begin(a, nodes[b].length);
    b = text_begin(b, nodes[a].length);
    while (a != b) a = nodes[a].parent, b = nodes[b].parent;
    return nodes[a].length;
}

const kvc_tokens *tokens_of(int node, int64_t junk, text_tokens *out) {
    int has_digests = 0;
    memset(out, 0, sizeof *out);
    out->tokens = (kvc_tokens){.struct_size = sizeof out->tokens, .ids = out->ids, .num_tokens = nodes[node].length};
    for (; node; node = nodes[node].parent) {
        const int i = nodes[node].length - 1, has_own = digest_of(nodes[node].symbol, out->digests[i]);
        out->ids[i] = has_own ? junk + i : symbol_ids[nodes[node].symbol];
        has_digests |= has_own;
    }
    if (has_digests || junk % 4 == 0) out->tokens.digests = &out->digests[0][0];
    return &out->tokens;
}

const char *spell(int node) {
    static _Thread_local char texts[4][MOST_TEXT + 1];
    static _Thread_local int turn;
    char *text = texts[turn++ % 4];
    text[nodes[node].length] = 0;
    for (; node; node = nodes[node].parent) text[nodes[node].length - 1] = (char)('a' + nodes[node].symbol);
    return text;
}
