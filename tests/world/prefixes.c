/* prefixes.c: what is done to the blocks of prefixes: they are pinned, evicted, forgotten and fetched. */
#include "oracle.h"

#include <string.h>

static pin *find_pin(prefix *p, int node) {
    pin *unused = NULL;
    for (int i = 0; i < p->num_pins; i++) {
        if (p->pins[i].node == node && p->pins[i].count) return &p->pins[i];
        if (!p->pins[i].count) unused = &p->pins[i];
    }
    if (!unused && p->num_pins < PINS) unused = &p->pins[p->num_pins++];
    if (unused) *unused = (pin){.node = node};
    return unused;
}

kvc_status right_pin(oracle *o, const call *c) {
    prefix *p = &o->prefixes[c->prefix];
    if (o->crowded || c->status) return KVC_OK;
    const int length = text_length(c->text);
    if (c->result < known(o, p, c->text, length, 1, 1) || c->result > known(o, p, c->text, length, 0, 1))
        wrong("%d tokens of %s are pinned", (int)c->result, spell(c->text));
    if (!c->result) return KVC_OK;
    pin *it = find_pin(p, c->text);
    if (!it) wrong("there is no place for a pin");
    it->count++;
    if (c->result >= it->kept) it->is_loose = 0;
    it->kept = it->kept > c->result ? it->kept : (int)c->result;
    return KVC_OK;
}

kvc_status right_unpin(oracle *o, const call *c) {
    prefix *p = &o->prefixes[c->prefix];
    for (int i = 0; i < p->num_pins; i++)
        if (p->pins[i].node == c->text && p->pins[i].count) p->pins[i].count--;
    while (p->num_pins && !p->pins[p->num_pins - 1].count) p->num_pins--;
    note_time(o);
    return KVC_OK;
}

/* The least recently used blocks go until `begin` tokens are dropped; result: how many were. */
kvc_status right_evict(oracle *o, const call *c) {
    prefix *p = &o->prefixes[c->prefix];
    int64_t most = 0, fewest = 0;
    if (o->crowded || c->status) return KVC_OK;
    for (int i = 0; i < p->num_blocks; i++) {
        const block *b = &p->blocks[i];
        most += text_length(b->node) - b->begin;
        if (b->is_sure && is_full_block(o, b) && !p->num_pins) fewest += o->block_size;
    }
    if (c->result < 0 || (c->result > most && !p->config.ttl_ms && !c->is_disturbed) ||
        (c->result < c->begin && c->result < fewest))
        wrong("%d tokens are evicted, of %d to %d", (int)c->result, (int)fewest, (int)most);
    if (c->result >= c->begin + o->block_size) wrong("%d tokens are evicted, not %d", (int)c->result, c->begin);
    if (c->result) note_doubt(o, p);
    return KVC_OK;
}

kvc_status right_prefix_clear(oracle *o, const call *c) {
    prefix *p = &o->prefixes[c->prefix];
    note_cleared(p);
    p->num_pins = 0;
    for (int s = 0; s < SLOTS; s++) /* whether commits keep more of a prompt whose first blocks are gone is open */
        if (o->sequences[s].prefix == 1 + c->prefix && o->sequences[s].keeps && holds_any(o, &o->sequences[s]))
            o->sequences[s].keeps = 1;
    return KVC_OK;
}

/* Forgetting a text drops the blocks that hold a row of one of its tokens, and those that follow all of it.  If no
 * layer sees all tokens, blocks that follow a part of it go as well. */
int drops(const oracle *o, const block *b, int text) {
    const int common = text_common(b->node, text);
    for (int l = 0; l < o->num_layers; l++)
        if (is_own(o, l) && o->layers[l].policy.kind == KVC_FULL)
            return common > b->begin || common == text_length(text);
    return common > 0;
}

kvc_status right_forget(oracle *o, const call *c) {
    prefix *p = &o->prefixes[c->prefix];
    int64_t most = 0, fewest = 0;
    p->num_forgets += (int)c->more;
    if (c->status) return KVC_OK;
    for (int i = p->num_blocks; text_length(c->text) && i-- > 0;) {
        block *b = &p->blocks[i];
        const int num = text_length(b->node) - b->begin;
        if (!drops(o, b, c->text)) continue;
        most += num;
        if (num_whole(o, b) && is_full_block(o, b)) fewest += num;
        *b = p->blocks[--p->num_blocks];
    }
    if (!o->crowded && !c->is_disturbed && (c->result < fewest || (c->result > most && !p->config.ttl_ms)))
        wrong("%d tokens of %s are forgotten, not %d to %d", (int)c->result, spell(c->text), (int)fewest, (int)most);
    for (int i = p->num_states; text_length(c->text) && i-- > 0;)
        if (text_common(p->states[i].node, c->text) > 0 &&
            (text_common(p->states[i].node, c->text) == text_length(p->states[i].node) ||
             text_common(p->states[i].node, c->text) == text_length(c->text)))
            p->states[i] = p->states[--p->num_states];
        else
            p->states[i].is_sure = 0;
    for (int i = 0; i < p->num_pins; i++)
        if (text_common(p->pins[i].node, c->text) > 0) p->pins[i].is_loose = 1;
    if (p->num_forgotten == FORGOTTEN)
        memmove(p->forgotten, p->forgotten + 1, sizeof p->forgotten - sizeof *p->forgotten);
    p->num_forgotten -= p->num_forgotten == FORGOTTEN;
    p->forgotten[p->num_forgotten++] = (forgotten){c->text, c->began, o->now};
    if (text_length(c->text)) p->horizon = o->now;
    return KVC_OK;
}

/* result: whether a forget was ended. */
kvc_status right_end_forget(oracle *o, const call *c) {
    o->prefixes[c->prefix].num_forgets -= (int)c->result;
    return KVC_OK;
}

int fetched[MOST_TEXTS];

void recall(const oracle *o, int text) {
    for (; text; text = text_begin(text, text_length(text) - 1)) fetched[text] = o->now;
}

int forgotten_at(const prefix *p, int text, int time, int began) {
    for (int i = 0; i < p->num_forgotten; i++) {
        const forgotten *f = &p->forgotten[i];
        if (text_common(f->node, text) == text_length(text) && time < f->time && fetched[text] < f->time &&
            f->end < began)
            return f->time;
    }
    return 0;
}

kvc_status right_fetch(oracle *o, const call *c) {
    prefix *p = &o->prefixes[c->prefix];
    if (!c->text) return KVC_ERR_INVALID;
    if (o->crowded) return KVC_OK;
    if (c->result < 0 || c->result % o->block_size) wrong("%d tokens are fetched", (int)c->result);
    if (c->result && p->num_forgets && !c->is_disturbed) wrong("%d tokens are fetched amid a forget", (int)c->result);
    note_fetched(o, p, c->text);
    o->has_fetched |= c->result > 0;
    if (!c->status && !c->more && !c->is_short && !c->is_disturbed && !has_windows(o) && !capacity_of(o) &&
        !o->config.max_bytes && !p->num_forgets)
        note_read(o, p, c);
    return KVC_OK;
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

/* Whether a block may stay although a block that was used later is evicted: it is pinned, or others hold its rows. */
static int may_stay(const oracle *o, const prefix *p, const block *b) {
    int num_own = 0;
    for (int l = 0; l < o->num_layers; l++) num_own += is_own(o, l);
    if (num_whole(o, b) < num_own || !is_full_block(o, b) || is_pinned(o, p, b, 0) || o->num_holds) return 1;
    for (int s = 0; s < SLOTS; s++) /* an acquired sequence has a place among the blocks, whatever became of its rows */
        if (o->sequences[s].prefix && text_common(o->sequences[s].prompt, b->node) > b->begin) return 1;
    for (int s = 0; s < SLOTS; s++)
        for (int l = 0; l < o->num_layers; l++)
            for (int i = 0; i < o->sequences[s].layers[l].num; i++) {
                const int text = tokens[o->sequences[s].layers[l].at[i].tag].text;
                if (text > 0 && text_length(text) > b->begin && text_common(text, b->node) == text_length(text))
                    return 1;
            }
    for (int i = 0; i < PREFIXES; i++)
        for (int j = 0; j < o->prefixes[i].num_blocks; j++) {
            const block *other = &o->prefixes[i].blocks[j];
            if (other != b && other->begin == b->begin && text_common(other->node, b->node) > b->begin) return 1;
        }
    return 0;
}

/* Checks that no block stays that was used before the evicted one.  A call uses a block after the blocks that follow
 * it. */
static void check_order(const oracle *o, const prefix *p, const block *evicted) {
    const int end = text_length(evicted->node);
    for (int i = 0; i < p->num_blocks; i++) {
        const block *b = &p->blocks[i];
        const int follows = b->begin >= end && text_common(b->node, evicted->node) == end;
        if (b != evicted && b->may_use < evicted->sure_use + follows && !may_stay(o, p, b))
            wrong("%s, used at %d, was evicted before %s, used at %d", spell(evicted->node), (int)evicted->sure_use,
                  spell(b->node), (int)b->may_use);
    }
}

void note_event(oracle *o, prefix *p, const kvc_prefix_event *event, int evicts, int is_kept_again) {
    block *b = NULL;
    for (int i = 0; i < p->num_blocks; i++)
        if (is_full_block(o, &p->blocks[i]) && !memcmp(p->blocks[i].name, event->name, KVC_NAME_BYTES))
            b = &p->blocks[i];
    if (event->kind != KVC_BLOCK_DROPPED || !b) return;
    if (!evicts && !p->config.ttl_ms) wrong("%s is dropped without a reason", spell(b->node));
    if (is_pinned(o, p, b, 1)) wrong("%s is dropped, and is pinned", spell(b->node));
    const int is_ordered = evicts == FIRST_USED || (evicts == FOR_ROWS && !o->config.max_bytes && !p->config.quota);
    if (is_ordered && !has_windows(o) && !p->config.ttl_ms) check_order(o, p, b);
    for (int i = p->num_states; i-- > 0;)
        if (text_common(b->node, p->states[i].node) > b->begin) p->states[i].is_sure = 0;
    b->is_sure = b->sure_new = 0;
    memset(b->sure, 0, sizeof b->sure);
    if (!is_kept_again) *b = p->blocks[--p->num_blocks];
}
