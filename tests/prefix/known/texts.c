/* texts.c: tokens, texts as nodes of a tree, and the rows and states that a model computes for them. */
#include "known.h"

typedef struct node {
    int parent, symbol, length;
    uint64_t hash;
    int children[SYMBOLS]; /* 0: none yet */
} node;

symbol symbols[SYMBOLS];
static node *nodes;
static int num_nodes, room;
static uint64_t below; /* what stands below digests: other numbers each time */

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

void make_symbols(void) {
    const int64_t ids[SYMBOLS] = {0, 1, 2, -1, (int64_t)1 << 40, INT64_MIN};
    for (int i = 0; i < SYMBOLS; i++) {
        symbols[i].id = ids[i];
        symbols[i].has_digest = i >= 6;
        for (int j = 0; j < KVC_NAME_BYTES; j++) symbols[i].digest[j] = (uint8_t)(mix((uint64_t)i * 64 + 1) >> j);
    }
    memset(symbols[6].digest, 0, KVC_NAME_BYTES); /* as the bytes of an id */
    symbols[6].digest[0] = 1;
    memset(symbols[7].digest, 0, KVC_NAME_BYTES);
    symbols[7].digest[KVC_NAME_BYTES - 1] = 1;
    room = 1024;
    nodes = calloc((size_t)room, sizeof *nodes);
    num_nodes = 1;
}

void begin_tokens(void) { below = 0; }

int text_behind(int parent, int s) {
    if (nodes[parent].children[s]) return nodes[parent].children[s];
    if (num_nodes == room) nodes = realloc(nodes, sizeof *nodes * (size_t)(room *= 2));
    const node *p = &nodes[parent];
    nodes[num_nodes] = (node){parent, s, p->length + 1, mix(p->hash * 31 + (uint64_t)s + 1), {0}};
    return nodes[parent].children[s] = num_nodes++;
}

int text_length(int n) { return nodes[n].length; }

int text_symbol(int n) { return nodes[n].symbol; }

int text_begin(int n, int length) {
    while (nodes[n].length > length) n = nodes[n].parent;
    return n;
}

int text_common(int a, int b) {
    a = text_begin(a, nodes[b].length);
    b = text_begin(b, nodes[a].length);
    while (a != b) a = nodes[a].parent, b = nodes[b].parent;
    return nodes[a].length;
}

uint64_t text_hash(int n, int model, int number) {
    return mix(nodes[n].hash + mix((uint64_t)model * 64 + (uint64_t)number + 1));
}

const kvc_tokens *tokens_of(int n, text_tokens *out) {
    int has_digests = 0;
    memset(out, 0, sizeof *out);
    out->tokens = (kvc_tokens){.struct_size = sizeof out->tokens, .ids = out->ids, .num_tokens = nodes[n].length};
    for (; n; n = nodes[n].parent) {
        const symbol *s = &symbols[nodes[n].symbol];
        const int i = nodes[n].length - 1;
        out->ids[i] = s->has_digest ? (int64_t)mix(++below) : s->id;
        if (s->has_digest) memcpy(out->digests[i], s->digest, KVC_NAME_BYTES), has_digests = 1;
    }
    if (has_digests || ++below % 4 == 0) out->tokens.digests = &out->digests[0][0];
    return &out->tokens;
}

const char *spell(int n) {
    static char texts[4][MOST_TEXT + 1];
    static int turn;
    char *text = texts[turn++ % 4];
    text[nodes[n].length] = 0;
    for (; n; n = nodes[n].parent) text[nodes[n].length - 1] = (char)('a' + nodes[n].symbol);
    return text;
}

/* Numbers that every type holds exactly; RoPE leaves the values alone. */
void make_row(const world *w, int model, int layer, int head, int n, float k[DIM], float v[DIM]) {
    const uint64_t bits = text_hash(n, w->models[model].like, layer * MOST_HEADS + head + 1);
    for (int i = 0; i < DIM; i++) {
        k[i] = (float)((bits >> 10 * i) & 1023);
        v[i] = (float)((bits >> (10 * i + 5)) & 1023);
    }
    v[0] = (float)nodes[n].symbol;
}

int make_state(const world *w, int model, int n, uint8_t *bytes) {
    const int like = w->models[model].like;
    const int size = 1 + (int)(text_hash(n, like, 60) % (uint64_t)w->models[model].state_bytes);
    for (int i = 0; i < size; i++) bytes[i] = (uint8_t)(text_hash(n, like, 61 + i / 8) >> 8 * (i % 8));
    return size;
}
