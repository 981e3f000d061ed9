/* edits.c: what edits do to sequences, and when they are refused. */
#include "oracle.h"

static range below(range r, int32_t length) {
    return r.begin >= length ? (range){0, 0} : (range){r.begin, r.end < length ? r.end : length};
}

/* Whether a sequence holds this row, the same slot at the same position. */
static int holds_row(const rows *list, int num, const row *r) {
    for (int i = 0; i < num; i++)
        if (list->at[i].slot == r->slot && list->at[i].position == r->position) return 1;
    return 0;
}

static int holds_position(const rows *list, int num, int32_t position) {
    for (int i = 0; i < num; i++)
        if (list->at[i].position == position) return 1;
    return 0;
}

/* The answer to dropping all rows from a position on, or to sharing the rows before it. */
static kvc_status may_cut(const oracle *o, const sequence *s, int32_t length) {
    return length < next_of(o, s) && misses_below(o, s, length, length) ? KVC_ERR_GONE : KVC_OK;
}

/* Whether an edit cuts what a row of some layer stands for: it removes or moves positions [begin, end), and moves
 * tokens by delta. */
static int cuts_rows(const oracle *o, int32_t next, int32_t begin, int32_t end, int32_t delta) {
    for (int l = 0; l < o->num_layers; l++) {
        const int32_t stride = stride_of(o, l);
        if (begin < next && (begin % stride || delta % stride || (end < next && end % stride))) return 1;
    }
    return 0;
}

/* Whether some layer's keys cannot be moved. */
static int is_unmovable(const oracle *o) {
    for (int l = 0; l < o->num_layers; l++)
        if (is_own(o, l) && o->layers[l].rope.kind == KVC_ROPE_UNKNOWN) return 1;
    return 0;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* `to` holds the rows of `from` at positions below a length, in place of its own. */
static void copy_prefix(oracle *o, const sequence *from, sequence *to, int32_t length) {
    end_sequence(o, to);
    to->date = from->date;
    to->from = from->from;
    to->text = from->text;
    to->is_open = from->is_open;
    for (int l = 0; l < o->num_layers; l++) {
        const rows *list = &from->layers[l];
        for (int i = 0; i < list->num; i++)
            if (list->at[i].position < length || is_cross(o, l)) add_row(&to->layers[l], list->at[i]);
        to->layers[l].lost = below(list->lost, length);
        to->layers[l].missing = below(list->missing, length);
    }
    if (from->exact_to < length && next_of(o, to)) make_inexact(to, from->exact_to);
    tidy(o, to, 0);
}

/* kvc_copy_prefix to `begin`; with flag: kvc_fork, to the end. */
kvc_status right_copy(oracle *o, const call *c) {
    const int32_t length = c->flag ? KVC_END : c->begin;
    sequence from = o->sequences[c->s];
    if (c->s == c->to) return KVC_ERR_INVALID;
    if (is_busy(o, c->s) || is_busy(o, c->to)) return KVC_ERR_BUSY;
    if (length && !holds_any(o, &from)) return KVC_ERR_INVALID;
    if (!c->flag && may_cut(o, &from, length)) return KVC_ERR_GONE;
    copy_prefix(o, &from, &o->sequences[c->to], length);
    return KVC_OK;
}

/* Adds the positions in [begin, end) that are gone from another list.  The first num rows of `to` are its own.  Returns
 * whether there are any. */
static int share_gone(const rows *to, range *gone, range from, int num, int32_t begin, int32_t end) {
    begin = from.begin > begin ? from.begin : begin;
    end = from.end < end ? from.end : end;
    while (begin < end && holds_position(to, num, begin)) begin++;
    while (begin < end && holds_position(to, num, end - 1)) end--;
    if (begin >= end) return 0;
    gone->begin = gone->end && gone->begin < begin ? gone->begin : begin;
    gone->end = gone->end > end ? gone->end : end;
    return 1;
}

/* A sequence is a copy of another from now on, in part unless it is new. */
static void note_source(sequence *s, const sequence *of, int is_new) {
    s->date = is_new || of->date < s->date ? of->date : s->date;
    s->from = is_new || !s->from || s->from == of->from ? of->from : of->from ? -1 : s->from;
}

/* Adds the rows of `from` behind those of `to`.  Whether rows of one token that was fetched are one row is open. */
static void share(oracle *o, const sequence *from, sequence *to, const call *c) {
    const int32_t begin = c->begin, end = c->end;
    const int32_t exact_to = o->has_twins && c->result == begin ? begin : shared_exact_to(o, from, to, begin, end);
    const int is_longer = text_length(from->text) > text_length(to->text), is_apart = begin > next_of(o, to);
    const int is_new = !is_there(o, to);
    int adds = 0;
    for (int l = 0; l < o->num_layers; l++) {
        const rows *list = &from->layers[l];
        rows *own = &to->layers[l];
        const int num = own->num;
        for (int i = 0; i < list->num && is_cross(o, l) && !num; i++) add_row(own, list->at[i]);
        if (is_cross(o, l)) continue;
        adds |= share_gone(own, &own->lost, list->lost, num, begin, end);
        share_gone(own, &own->missing, list->missing, num, begin, end);
        for (int i = 0; i < list->num; i++)
            if (list->at[i].position >= begin && list->at[i].position < end && !holds_row(own, num, &list->at[i]))
                add_row(own, list->at[i]), adds = 1;
    }
    if (adds) {
        make_inexact(to, exact_to);
        if (exact_to > begin && is_longer) to->text = from->text;
        if (is_apart && to->keeps) to->keeps = 1; /* blocks before the edit may still fill */
        note_edit(to);
        note_source(to, from, is_new);
    }
    tidy(o, to, 0);
}

kvc_status right_share(oracle *o, const call *c) {
    const sequence from = o->sequences[c->s];
    sequence *to = &o->sequences[c->to];
    if (c->s == c->to) return KVC_ERR_INVALID;
    if (is_busy(o, c->s) || is_busy(o, c->to)) return KVC_ERR_BUSY;
    if (holds_any(o, &from) && cuts_rows(o, next_of(o, &from), c->begin, KVC_END, 0)) return KVC_ERR_UNSUPPORTED;
    if ((o->has_twins || o->crowded) && c->status == KVC_ERR_INVALID)
        return KVC_ERR_INVALID; /* rows of one token may differ */
    if (!holds_any(o, &from) && !is_there(o, to) && c->begin == 0 && c->end == KVC_END) return KVC_ERR_INVALID;
    for (int l = 0; l < o->num_layers; l++)
        for (int i = 0; is_own(o, l) && i < to->layers[l].num; i++) {
            const row *r = &to->layers[l].at[i];
            const rows *list = &from.layers[l];
            if (r->position >= c->begin && r->position < c->end && holds_position(list, list->num, r->position) &&
                !holds_row(list, list->num, r))
                return KVC_ERR_INVALID;
        }
    if (holds_any(o, &from) && c->begin < c->end) share(o, &from, to, c);
    return KVC_OK;
}

/* ---- moves ------------------------------------------------------------------------------------------------------- */

/* The range of the positions of missing rows once [begin, end) were moved or divided, from the lowest to the highest.
 * These follow from the first and last position that moves, and from the first and last that does not. */
static range moved_range(range r, int32_t begin, int32_t end, int32_t delta, int32_t divisor) {
    const int64_t ends[] = {r.begin, r.end - 1, begin - (int64_t)1, begin, end - (int64_t)1, end, -(int64_t)delta};
    range moved = {0, 0};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const int64_t at = ends[i];
        const int64_t to = at < begin || at >= end ? at : divisor ? at / divisor : at + delta;
        if (at >= r.begin && at < r.end && to >= 0) widen(&moved, to < INT32_MAX - 1 ? (int32_t)to : INT32_MAX - 2);
    }
    return moved;
}

/* Keys that carry a rotation are rewritten when they are divided.  Keys of a function are always rewritten. */
static void move_layer(oracle *o, sequence *s, int l, int32_t begin, int32_t end, int32_t delta, int32_t divisor,
                       int moves_gone) {
    rows *list = &s->layers[l];
    const int rotates = has_rope(o, l, KVC_ROPE_FREQUENCIES);
    const int copies = has_rope(o, l, KVC_ROPE_FUNCTION) || (rotates && divisor);
    int num = 0;
    for (int i = 0; i < list->num; i++) {
        row r = list->at[i];
        if (r.position >= begin && r.position < end) {
            const int64_t to = divisor ? r.position / divisor : (int64_t)r.position + delta;
            if (to < 0) continue;
            r.delta = copies ? 0 : rotates ? (int32_t)(r.delta + to - r.position) : 0;
            r.slot = copies ? o->next_slot++ : r.slot;
            r.position = (int32_t)to;
        }
        list->at[num++] = r;
    }
    list->num = num;
    list->lost = moves_gone ? moved_range(list->lost, begin, end, delta, divisor) : list->lost;
    list->missing = moves_gone ? moved_range(list->missing, begin, end, delta, divisor) : list->missing;
}

/* Moves [begin, end) by delta, or divides it.  moves_gone: expired positions move as well. */
static void move(oracle *o, sequence *s, int32_t begin, int32_t end, int32_t delta, int32_t divisor, int moves_gone) {
    const int32_t next = next_of(o, s);
    int32_t to = divisor ? begin / divisor : begin;
    const int64_t dropped = end < -(int64_t)delta ? end : -(int64_t)delta; /* positions below are dropped */
    const int drops_all = !divisor && begin + (int64_t)delta < 0 && dropped >= next;
    if (divisor ? divisor == 1 : delta == 0) return;
    if (!divisor && delta < 0) to = begin + delta > 0 ? begin + delta : 0;
    if (begin < end && begin < next) note_edit(s);
    if (begin < end && begin < next && !drops_all)
        make_inexact(s, to < begin && (divisor || end > -(int64_t)delta) ? to : begin);
    for (int l = 0; l < o->num_layers; l++)
        if (is_own(o, l)) move_layer(o, s, l, begin, end, delta, divisor, moves_gone);
    if (begin < end && begin < next && drops_all) cut_exact(o, s, next);
    tidy(o, s, next > 0);
}

/* The largest position of [begin, end); -1: the range holds no row. */
static int32_t last_in(const oracle *o, const sequence *s, int32_t begin, int32_t end) {
    int32_t last = -1;
    for (int l = 0; l < o->num_layers; l++)
        for (int i = 0; is_own(o, l) && i < s->layers[l].num; i++) {
            const int32_t position = s->layers[l].at[i].position;
            last = position >= begin && position < end && position > last ? position : last;
        }
    return last;
}

kvc_status right_move(oracle *o, const call *c) {
    const oracle *before = o;
    oracle after = *o;
    sequence *s = &after.sequences[c->s];
    const int32_t next = next_of(o, s), last = last_in(o, s, c->begin, c->end), divisor = c->flag ? c->delta : 0;
    if (is_unmovable(o) && next > 0) return KVC_ERR_UNSUPPORTED;
    if (is_busy(o, c->s)) return KVC_ERR_BUSY;
    if (!divisor && last >= 0 && (int64_t)last + c->delta > INT32_MAX - 1) return KVC_ERR_INVALID;
    if (divisor > 1 && o->unit > 1 && is_there(o, s)) return KVC_ERR_UNSUPPORTED;
    if (!divisor && c->delta && holds_any(o, s) && cuts_rows(o, next, c->begin, c->end, c->delta))
        return KVC_ERR_UNSUPPORTED;
    if (holds_any(o, s)) move(&after, s, c->begin, c->end, c->delta, divisor, 1);
    if (fits_copies(before, &after)) return KVC_ERR_FULL;
    *o = after;
    return KVC_OK;
}

static range removed_range(range r, int32_t begin, int32_t end, int shifts) {
    const int32_t down = shifts ? end - begin : 0;
    range left = {0, 0};
    if (r.begin < begin && r.begin < r.end) left = (range){r.begin, r.end < begin ? r.end : begin};
    if (r.end > end && r.begin < r.end) {
        widen(&left, (r.begin > end ? r.begin : end) - down);
        widen(&left, r.end - 1 - down);
    }
    return left;
}

static void remove_range(oracle *o, sequence *s, int32_t begin, int32_t end, int shifts) {
    const int32_t next = next_of(o, s);
    const int moves = shifts && extreme_of(o, s, 1) >= end, had = next > 0 || (begin == 0 && end > 0);
    if (!holds_any(o, s)) return;
    if (begin < end && begin < next) note_edit(s);
    if (begin < end && end < next) make_inexact(s, begin);
    for (int l = 0; l < o->num_layers; l++) {
        rows *list = &s->layers[l];
        int num = 0;
        if (!is_own(o, l)) continue;
        for (int i = 0; i < list->num; i++)
            if (list->at[i].position < begin || list->at[i].position >= end) list->at[num++] = list->at[i];
        list->num = num;
        list->lost = removed_range(list->lost, begin, end, shifts);
        list->missing = removed_range(list->missing, begin, end, shifts);
    }
    if (begin < end && end >= next) cut_exact(o, s, next);
    if (moves) move(o, s, end, KVC_END, begin - end, 0, 0);
    tidy(o, s, had);
}

kvc_status right_remove(oracle *o, const call *c) {
    oracle after = *o;
    const sequence *s = &o->sequences[c->s];
    const int32_t next = next_of(o, s);
    const int moves = c->flag && extreme_of(o, s, 1) >= c->end, cuts = c->end >= next;
    if (is_busy(o, c->s)) return KVC_ERR_BUSY;
    if (moves && is_unmovable(o)) return KVC_ERR_UNSUPPORTED;
    if (holds_any(o, s) && c->begin < c->end && !cuts && cuts_rows(o, next, c->begin, c->end, c->begin - c->end))
        return KVC_ERR_UNSUPPORTED;
    remove_range(&after, &after.sequences[c->s], c->begin, c->end, c->flag);
    if (cuts ? may_cut(o, s, c->begin) : fits_copies(o, &after)) return cuts ? KVC_ERR_GONE : KVC_ERR_FULL;
    *o = after;
    return KVC_OK;
}

kvc_status right_truncate(oracle *o, const call *c) {
    sequence *s = &o->sequences[c->s];
    if (is_busy(o, c->s)) return KVC_ERR_BUSY;
    if (may_cut(o, s, c->begin)) return KVC_ERR_GONE;
    remove_range(o, s, c->begin, KVC_END, 0);
    return KVC_OK;
}

/* ---- chosen positions -------------------------------------------------------------------------------------------- */

static int is_listed(const call *c, int32_t position) {
    for (int i = 0; i < c->num; i++)
        if (c->positions[i] == position) return 1;
    return 0;
}

/* Whether some layer has a row at a position, or the position has expired there. */
static int is_known(const oracle *o, const sequence *s, int32_t position) {
    for (int l = 0; l < o->num_layers; l++) {
        const rows *list = &s->layers[l];
        if (is_own(o, l) && find_row(list, position)) return 1;
        if (position >= list->lost.begin && position < list->lost.end) return 1;
        if (position >= list->missing.begin && position < list->missing.end) return 1;
    }
    return 0;
}

kvc_status right_keep_positions(oracle *o, const call *c) {
    sequence *s = &o->sequences[c->s];
    const int32_t next = next_of(o, s);
    int32_t first = INT32_MAX, end = 0;
    for (int i = 0; i < c->num; i++)
        if (is_known(o, s, c->positions[i])) end = c->positions[i] + 1;
    if (is_busy(o, c->s)) return KVC_ERR_BUSY;
    if (may_cut(o, s, end)) return KVC_ERR_GONE;
    if (!holds_any(o, s)) return KVC_OK;
    for (int l = 0; l < o->num_layers; l++) {
        rows *list = &s->layers[l];
        int num = 0;
        if (!is_own(o, l)) continue;
        for (int i = 0; i < list->num; i++)
            if (is_listed(c, list->at[i].position))
                list->at[num++] = list->at[i];
            else
                first = list->at[i].position < first ? list->at[i].position : first;
        list->num = num;
        list->lost = below(list->lost, end);
        list->missing = below(list->missing, end);
    }
    if (first < INT32_MAX || end < next) note_edit(s);
    cut_exact(o, s, next);
    if (first < next_of(o, s)) make_inexact(s, first);
    tidy(o, s, next > 0 || !end);
    return KVC_OK;
}

/* ---- rows that change where they lie ----------------------------------------------------------------------------- */

/* Whether several rows have this slot. */
static int is_shared(const oracle *o, int l, int32_t slot) {
    int num = 0;
    for (int s = 0; s < SLOTS; s++)
        for (int i = 0; i < o->sequences[s].layers[l].num; i++) num += o->sequences[s].layers[l].at[i].slot == slot;
    return num > 1;
}

/* Replaces the latest rows at [begin, end) in a layer.  Rows that others hold are copied first. */
kvc_status right_inject(oracle *o, const call *c) {
    oracle after = *o;
    sequence *s = &after.sequences[c->s];
    const int32_t stride = stride_of(o, c->layer);
    int num_rows = c->end / stride - c->begin / stride, num = 0;
    if (o->layers[c->layer].share || o->layers[c->layer].policy.kind == KVC_NONE) return KVC_ERR_INVALID;
    if (is_cross(o, c->layer)) return KVC_ERR_UNSUPPORTED;
    if (is_busy(o, c->s)) return KVC_ERR_BUSY;
    for (int32_t at = c->begin; at < c->end; at++) num += find_row(&s->layers[c->layer], at) != NULL;
    if (!c->flag && num < num_rows) return KVC_ERR_INDEX;
    for (int l = 0; l < o->num_layers; l++)
        for (int i = 0; same_group(o, l, c->layer) && i < s->layers[l].num; i++) {
            row *r = &s->layers[l].at[i];
            if (r->position >= c->begin && r->position < c->end && is_shared(&after, l, r->slot))
                r->slot = after.next_slot++;
        }
    for (int32_t at = c->begin; at < c->end; at++) {
        row *r = (row *)find_row(&s->layers[c->layer], at);
        if (!r) continue;
        r->tag = c->tag + (at / stride - c->begin / stride);
        tokens[r->tag] = (token){.base = at, .time = c->began};
        make_inexact(s, c->begin / stride * stride + stride - 1);
        note_edit(s);
    }
    for (int i = 0; i < PREFIXES; i++) after.has_twins |= num && o->prefixes[i].num_blocks; /* may have the old rows */
    tidy(&after, s, 0);
    if (fits_copies(o, &after)) return KVC_ERR_FULL;
    *o = after;
    return KVC_OK;
}

kvc_status right_mark_inexact(oracle *o, const call *c) {
    sequence *s = &o->sequences[c->s];
    if (is_there(o, s) || is_busy(o, c->s)) {
        make_inexact(s, c->begin);
        if (s->keeps) s->keeps = 1;
    }
    if (holds_any(o, s)) tidy(o, s, 0);
    return KVC_OK;
}

/* ---- all of a sequence, or of the cache -------------------------------------------------------------------------- */

kvc_status right_clear_sequence(oracle *o, const call *c) {
    if (is_busy(o, c->s)) return KVC_ERR_BUSY;
    end_sequence(o, &o->sequences[c->s]);
    return KVC_OK;
}

/* Ends all sequences except one, and drops what prefixes keep.  Pins stay. */
kvc_status right_keep(oracle *o, const call *c) {
    for (int s = 0; s < SLOTS; s++)
        if (s != c->s && is_busy(o, s)) return KVC_ERR_BUSY;
    for (int s = 0; s < SLOTS; s++)
        if (s != c->s) end_sequence(o, &o->sequences[s]);
    for (int i = 0; i < PREFIXES; i++) note_cleared(&o->prefixes[i]);
    if (c->s >= 0 && o->sequences[c->s].keeps) o->sequences[c->s].keeps = 1;
    return KVC_OK;
}

kvc_status right_clear(oracle *o, const call *c) {
    call all = *c;
    all.s = -1;
    return right_keep(o, &all);
}

kvc_status right_compact(oracle *o, const call *c) {
    return is_engaged(o, c) ? KVC_ERR_BUSY : o->num_holds && !o->crowded ? KVC_ERR_HELD : KVC_OK;
}

/* A sequence of the file takes the place of what its new id held.  Nobody knows how old its rows are.  Whether the old
 * rows count for the capacity is open. */
kvc_status right_restore(oracle *o, const call *c) {
    oracle after = *o;
    sequence *to = &after.sequences[c->to];
    if (is_busy(o, c->to)) return KVC_ERR_BUSY;
    note_end(&after, to);
    *to = o->files[c->client]->sequences[c->num];
    to->prefix = to->prompt = to->keeps = to->state = 0;
    to->date = -1, to->from = 0;
    copy_rows(&after, to);
    if (fits_copies(o, &after) || (c->status == KVC_ERR_FULL && capacity_of(o))) return KVC_ERR_FULL;
    *o = after;
    return KVC_OK;
}

kvc_status right_clone(oracle *o, const call *c) { return is_engaged(o, c) ? KVC_ERR_BUSY : KVC_OK; }
