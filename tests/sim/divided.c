/* divided.c: sequences of the simulated cache with several rows at one position, as kvc_divide leaves them.
 *
 * Their owner edits and copies them, and compares them with a list of rows in order of arrival.
 */
#include <string.h>

#include "sim.h"

/* The rows of a sequence in one layer, in order of arrival. */
typedef struct list {
    int num;
    int positions[MOST], tags[MOST];
} list;

typedef struct divided {
    list layers[MOST_LAYERS];
} divided;

/* The position to which a row goes; -1 drops it. */
typedef struct move {
    int begin, end, delta; /* rows in [begin, end) are dropped, those behind move */
    int divisor;           /* not 0: those in it are divided by it instead */
} move;

static int moved(const move *m, int position) {
    if (position < m->begin) return position;
    if (position < m->end) return m->divisor ? position / m->divisor : -1;
    return position + m->delta;
}

static void apply(const client *c, divided *d, move m) {
    for (int l = 0; l < c->w->num_layers; l++) {
        list *rows = &d->layers[l];
        int num = 0;
        for (int i = 0; i < rows->num; i++) {
            const int to = moved(&m, rows->positions[i]);
            if (to < 0) continue;
            rows->positions[num] = to;
            rows->tags[num++] = rows->tags[i];
        }
        rows->num = num;
    }
}

/* Reads a sequence's rows in a layer; returns whether it could. */
static int read_list(client *c, int s, int l, list *to) {
    rows r;
    int64_t num = 0;
    kvc_rows_out out = out_of(c->w, l, &r);
    out.num_stored = &num;
    const uint64_t faults = sim_faults();
    do { /* others may expire some in between */
        num = kvc_seq_len(c->w->cache, id_of(s), l);
        if (num < 0 || num > MOST)
            fail(c, "sequence %lld has %lld rows in layer %d", (long long)id_of(s), (long long)num, l);
        const kvc_status status = kvc_gather(c->w->cache, id_of(s), l, 0, num, &out);
        if (status == KVC_OK) break;
        if (sim_faults() != faults) return 0;
        if (status != KVC_ERR_INDEX || !c->w->expires) fail(c, "kvc_gather: %s", kvc_strerror(status));
    } while (1);
    to->num = (int)num;
    for (int i = 0; i < to->num; i++) {
        to->positions[i] = r.positions[i];
        to->tags[i] = tag_of(c, r.k[0][i], r.v[0][i], MOST * ROW, MOST * ROW, l, r.positions[i]);
    }
    return 1;
}

/* Compares a sequence with the list: rows that expire may lack. */
static void compare(client *c, int s, const divided *d) {
    list found;
    for (int l = 0; l < c->w->num_layers; l++) {
        const list *wanted = &d->layers[l];
        if (!is_own(c->w, l) || !read_list(c, s, l, &found)) continue;
        int n = 0;
        for (int i = 0; i < wanted->num; i++) {
            const int is_next =
                n < found.num && found.positions[n] == wanted->positions[i] && found.tags[n] == wanted->tags[i];
            n += is_next;
            if (!is_next && c->w->layers[l].policy.kind == KVC_FULL)
                fail(c, "sequence %lld lacks row %d with tag %d at %d, layer %d", (long long)id_of(s), i,
                     wanted->tags[i], wanted->positions[i], l);
        }
        if (n < found.num)
            fail(c, "sequence %lld has a row with tag %d at %d as row %d of layer %d", (long long)id_of(s),
                 found.tags[n], found.positions[n], n, l);
    }
}

/* Makes another call on a divided sequence, and copies of it in `to`. */
static void edit_divided(client *c, int s, int to, divided *d, divided *copy) {
    kvc_cache *cache = c->w->cache;
    const int next = kvc_next_position(cache, id_of(s)), begin = pick(next + 1), end = begin + pick(next - begin + 1);
    if (!next) return;
    switch (pick(7)) {
    case 0:
    case 1: {
        const int length = pick(2) ? KVC_END : begin;
        begin_call(c, "kvc_copy_prefix of a divided sequence");
        const kvc_status status = length == KVC_END ? kvc_fork(cache, id_of(s), id_of(to))
                                                    : kvc_copy_prefix(cache, id_of(s), id_of(to), length);
        if (!ended(c, status, MAY_BE_GONE)) break;
        *copy = *d;
        if (length < KVC_END) apply(c, copy, (move){.begin = length, .end = MOST});
        break;
    }
    case 2:
        begin_call(c, "kvc_truncate of a divided sequence");
        if (ended(c, kvc_truncate(cache, id_of(s), begin), MAY_BE_GONE))
            apply(c, d, (move){.begin = begin, .end = MOST});
        break;
    case 3: {
        const int shifts = pick(2);
        begin_call(c, "kvc_remove of a divided sequence");
        if (ended(c, kvc_remove(cache, id_of(s), begin, end, shifts), MAY_BE_GONE | MAY_BE_FULL))
            apply(c, d, (move){begin, end, shifts ? begin - end : 0, 0});
        break;
    }
    case 4: {
        const int delta = pick(MOST - next + 1);
        begin_call(c, "kvc_shift of a divided sequence");
        if (ended(c, kvc_shift(cache, id_of(s), begin, KVC_END, delta), MAY_BE_FULL))
            apply(c, d, (move){begin, begin, delta, 0});
        break;
    }
    case 5: {
        const int divisor = 1 + pick(3);
        begin_call(c, "kvc_divide of a divided sequence");
        if (ended(c, kvc_divide(cache, id_of(s), 0, KVC_END, divisor), MAY_BE_FULL))
            apply(c, d, (move){.end = MOST, .divisor = divisor});
        break;
    }
    default:
        begin_call(c, "kvc_settle of a divided sequence");
        ended(c, kvc_settle(cache), MAY_BE_BUSY | MAY_BE_HELD | MAY_BE_FULL);
    }
}

/* Divides positions of a sequence that has rows for several of them, which must be refused. */
static void divide_wrongly(client *c, int s) {
    const int is_empty = !kvc_next_position(c->w->cache, id_of(s));
    begin_call(c, "kvc_divide beside a stride");
    const kvc_status status = kvc_divide(c->w->cache, id_of(s), pick(9), KVC_END, 2 + pick(3));
    if (ended(c, status, MAY_BE_UNSUPPORTED) && !is_empty && !c->w->is_meddled) fail(c, "is not refused");
}

void divide(client *c, int s) {
    divided d, copy = {0};
    if (c->w->unit > 1) {
        divide_wrongly(c, s);
        return;
    }
    const int to = take(c), begin = pick(9), divisor = 2 + pick(3);
    const sequence *of = &c->w->sequences[s];
    int is_read = to >= 0 && !c->w->is_meddled && !of->is_spoilt && clear_one(c, to);
    c->call = "kvc_gather";
    for (int l = 0; is_read && l < c->w->num_layers; l++)
        if (is_own(c->w, l)) is_read = read_list(c, s, l, &d.layers[l]);
    begin_call(c, "kvc_divide");
    if (ended(c, kvc_divide(c->w->cache, id_of(s), begin, KVC_END, divisor), MAY_BE_FULL)) {
        if (is_read) {
            for (int l = 0; l < c->w->num_layers; l++)
                if (!is_own(c->w, l)) d.layers[l].num = 0;
            apply(c, &d, (move){.begin = begin, .end = MOST, .divisor = divisor});
            compare(c, s, &d);
        }
        for (int i = pick(5); is_read && i > 0; i--) {
            edit_divided(c, s, to, &d, &copy);
            compare(c, s, &d);
            compare(c, to, &copy);
        }
        while (!clear_one(c, s)) continue;
        while (is_read && !clear_one(c, to)) continue;
    }
    let_go(c, to);
}
