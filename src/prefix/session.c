/* session.c: the sequences that a prefix has acquired, whose blocks are kept for prompts to come: see session.h.
 *
 * A session is what the prefix notes of such a sequence.  It is the follower of the sequence, whose end calls ended().
 *
 *   last          the last block of the tree that is known to begin the sequence
 *   known_to      up to there the tokens are known: from the prompt.  Generated ones are not, until the release
 *   kept_to       up to there blocks are kept: in the tree, or in `pending` if their tokens are not known
 *   exact         a row follows from its tokens alone; only such rows are kept
 *   edited_from   edits have changed rows of the sequence from there on; INT32_MAX: none has */
#include "prefix/prefix.h"

#include <string.h>

/* ---- beginning and ending ---------------------------------------------------------------------------------------- */

static int32_t block_size(const kvc_session *session) { return session->prefix->cache->pools[0].block_size; }

/* Sets session->last, which has a user while it is that. */
static void set_last(kvc_session *session, kvc_node *last) {
    kvc_node *before = session->last;
    kvc_node_use(last, 1);
    session->last = last;
    if (before) kvc_node_use(before, -1);
}

/* Drops pending blocks that end behind a position; ended() in tree.c takes them out of the list. */
static void drop_pending(kvc_session *session, int32_t position) {
    while (session->pending && session->pending->end > position) kvc_node_drop(session->pending);
}

void kvc_sessions_drop_pending(const kvc_prefix *prefix) {
    for (kvc_session *session = prefix->sessions; session; session = session->next)
        drop_pending(session, /* position */ 0);
}

static void drop_state(kvc_session *session) {
    kvc_checkpoint_use(session->prefix->cache, session->state, -1);
    session->state = NULL;
}

/* Ends the session when its sequence ends.  Its blocks are marked as used, those nearest to the root as the last. */
static void ended(kvc_cache *cache, kvc_follower *follower) {
    kvc_session *session = (kvc_session *)(void *)follower;
    (void)cache;
    drop_pending(session, /* position */ 0);
    drop_state(session);
    kvc_node_touch(session->last);
    kvc_node_use(session->last, -1);
    *session->at = session->next;
    if (session->next) session->next->at = session->at;
    session->prefix->stats.sequences--;
    kvc_session_free(session);
}

kvc_session *kvc_session_new(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t matched) {
    const int32_t block = prefix->cache->pools[0].block_size, begin = matched / block * block;
    const kvc_token_span first = kvc_tokens_part(tokens, 0, 1),
                         prompt = kvc_tokens_part(tokens, begin, tokens->num_tokens);
    const size_t rest = (size_t)prompt.num, digest_bytes = prompt.digests ? KVC_NAME_BYTES : 0;
    const uint64_t num = (uint64_t)rest + 1, size = sizeof(kvc_session) + num * (sizeof(int64_t) + digest_bytes);
    kvc_session *session = kvc_memory_alloc(&prefix->cache->memory, size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!session) {
        kvc_set_last_error("out of memory for a prompt of %lld tokens", (long long)tokens->num_tokens);
        return NULL;
    }
    /* Behind the struct: the prompt's first token, its tokens from `begin` on, and the digests of both. */
    int64_t *ids = (int64_t *)(void *)(session + 1);
    uint8_t *digests = digest_bytes ? (uint8_t *)(ids + num) : NULL;
    ids[0] = first.ids[0];
    if (rest) memcpy(ids + 1, prompt.ids, rest * sizeof *ids);
    if (digests) memcpy(digests, first.digests, digest_bytes);
    if (digests && rest) memcpy(digests + digest_bytes, prompt.digests, rest * digest_bytes);
    *session = (kvc_session){
        .follower = {ended, NULL},
        .num_bytes = size,
        .counted_bytes = (tokens->num_tokens - matched) * (int64_t)(sizeof *ids + digest_bytes),
        .prefix = prefix,
        .kept_to = begin,
        .known_to = begin + prompt.num,
        .begin = begin,
        .first = {ids, digests, 1},
        .prompt = {.ids = ids + 1, .num_tokens = prompt.num, .digests = digests ? digests + digest_bytes : NULL}};
    prefix->cache->prefixes.prompt_bytes += session->counted_bytes;
    return session;
}

void kvc_session_free(kvc_session *session) {
    kvc_cache *cache = session->prefix->cache;
    cache->prefixes.prompt_bytes -= session->counted_bytes;
    kvc_memory_free(&cache->memory, session, session->num_bytes, KVC_MEMORY_BOOKKEEPING, -1);
}

void kvc_session_begin(kvc_session *session, kvc_sequence *sequence, kvc_node *last, kvc_checkpoint *state) {
    kvc_prefix *prefix = session->prefix;
    session->sequence = sequence;
    session->state = state;
    kvc_checkpoint_use(prefix->cache, state, 1);
    sequence->follower = &session->follower;
    sequence->from = prefix->number;
    set_last(session, last);
    session->next = prefix->sessions;
    session->at = &prefix->sessions;
    if (prefix->sessions) prefix->sessions->at = &session->next;
    prefix->sessions = session;
    prefix->stats.sequences++;
}

void kvc_session_roll_back(kvc_session *session, int32_t position) {
    const int32_t full = position / block_size(session) * block_size(session);
    if (session->kept_to > full) session->kept_to = full;
    if (session->known_to > full) session->known_to = full;
    kvc_node *last = full ? session->last : &session->last->tree->root;
    while (last->end > full) last = last->parent;
    set_last(session, last);
    drop_pending(session, position);
}

int kvc_prefix_may_keep(const kvc_prefix *prefix, const kvc_sequence *sequence, kvc_token_span first) {
    if (kvc_tree_is_forgetting(prefix->tree, first)) return 0;
    const int is_own = !sequence->from || sequence->from == prefix->number; /* 0: no prefix has acquired it */
    return !prefix->horizon || (is_own && sequence->date >= prefix->horizon);
}

/* Rolls a session back to where edits have changed its sequence since the last call, but at most to `position`. */
static void note_edits(kvc_session *session, int32_t position) {
    if (session->sequence->edited_from < position) position = session->sequence->edited_from;
    session->sequence->edited_from = INT32_MAX;
    if (position < INT32_MAX) kvc_session_roll_back(session, position);
}

/* ---- blocks that fill -------------------------------------------------------------------------------------------- */

/* Adds a node to the tree as used now. */
static kvc_node *add_now(kvc_node *parent, kvc_node *node, const kvc_token_span *tokens) {
    return kvc_tree_add(parent, node, tokens, ++parent->tree->cache->evicting.num_uses);
}

/* Keeps the block behind kept_to: in the tree if its tokens are known, otherwise in `pending`.  Returns 0 at failure.
 */
static int keep_next(kvc_session *session) {
    const int32_t begin = session->kept_to, end = begin + block_size(session);
    const int is_known = session->last->end == begin && end <= session->known_to;
    kvc_token_span tokens = {0};
    kvc_node *node = NULL;
    if (is_known) {
        tokens = kvc_tokens_part(&session->prompt, begin - session->begin, end - session->begin);
        node = kvc_node_find(session->last, &tokens);
        if (node) kvc_node_relist(node); /* to compute it again is a use */
    }
    if (!node) {
        const kvc_status status =
            kvc_node_new(session->prefix->tree, session->sequence, begin, end, &session->pending, &node);
        if (status != KVC_OK) return 0;
        if (is_known) /* where windows have lost all rows of the block, it is a place for what follows */
            node = node ? add_now(session->last, node, &tokens) : kvc_tree_add_empty(session->last, &tokens);
        if (is_known && !node) return 0;
    }
    if (is_known) set_last(session, node);
    session->kept_to = end;
    return 1;
}

/* Keeps the full blocks of a sequence up to position `end`, for prompts to find, if their rows are exact: those below
 * exact_to.  A touch of the last one counts as a use of those before it, which stay longer. */
static void keep_full_blocks(kvc_session *session, int32_t end, int32_t exact_to) {
    const kvc_node *before = session->last;
    if (end > exact_to) end = exact_to;
    while (session->kept_to <= end - block_size(session) && keep_next(session)) continue;
    if (session->last != before) kvc_node_touch(session->last);
}

/* Positions of a batch's tokens of one sequence. */
typedef struct range {
    int32_t begin, end; /* the lowest, and behind the largest that is kept */
    int32_t dropped;    /* the lowest that is not kept; INT32_MAX: all are */
} range;

static range range_of(const kvc_batch *batch, const kvc_batch_sequence *member) {
    const int32_t *token = batch->order + member->first;
    range r = {INT32_MAX, 0, INT32_MAX};
    for (int32_t i = 0; i < member->num_tokens; i++) {
        const int32_t position = batch->positions[token[i]];
        r.begin = kvc_lower(r.begin, position);
        if (!batch->committed[token[i]])
            r.dropped = kvc_lower(r.dropped, position);
        else if (position >= r.end)
            r.end = position + 1;
    }
    return r;
}

/* Returns the position up to which a sequence of the batch has all its tokens, and exact ones. */
static int32_t find_exact_to(const kvc_batch *batch, const kvc_sequence *sequence) {
    const int32_t exact_to = kvc_exact_to_with_batch(batch->cache, sequence);
    if (sequence->exact_to >= kvc_sequence_next(sequence)) return exact_to; /* all rows before the batch are exact */
    return kvc_lower(exact_to, kvc_sequence_num_exact(sequence));
}

void kvc_sessions_fill(const kvc_batch *batch) {
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        kvc_session *session = (kvc_session *)(void *)member->sequence->follower;
        if (!session) continue;
        const range r = range_of(batch, member);
        kvc_tree_date(session->prefix->tree);
        drop_state(session);
        const int is_other = batch->replaced || r.begin < session->kept_to; /* than what was kept there */
        note_edits(session, member->is_unstored ? 0 : is_other ? r.begin : r.dropped);
        if (member->is_unstored || batch->replaced ||
            !kvc_prefix_may_keep(session->prefix, member->sequence, session->first))
            continue;
        keep_full_blocks(session, r.end, find_exact_to(batch, member->sequence));
    }
}

/* ---- blocks whose tokens become known ---------------------------------------------------------------------------- */

kvc_session *kvc_session_of(const kvc_prefix *prefix, const kvc_sequence *sequence) {
    kvc_session *session = (kvc_session *)(void *)sequence->follower;
    return session && session->prefix == prefix ? session : NULL;
}

/* Reverses the list `pending`. */
static void turn_pending(kvc_session *session) {
    kvc_node *turned = NULL;
    for (kvc_node *node; (node = session->pending);) {
        session->pending = node->next;
        node->next = turned;
        if (turned) turned->at = &node->next;
        turned = node;
    }
    session->pending = turned;
    if (turned) turned->at = &session->pending;
}

/* Returns whether a sequence holds rows of a node's tokens that the node lacks. */
static int adds_rows(const kvc_sequence *sequence, const kvc_node *node) {
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const int32_t stride = sequence->pools[g].stride;
        if (kvc_runs_visit(&sequence->runs[g], kvc_rows_below(node->begin, stride), kvc_rows_below(node->end, stride),
                           NULL, NULL) > node->rows->runs[g].num_rows)
            return 1;
    }
    return 0;
}

/* Returns the block behind `parent` with these tokens, or unless is_exact one that begins with them, if it has all rows
 * of theirs that the sequence holds; otherwise NULL. */
static kvc_node *find_kept(const kvc_node *parent, const kvc_sequence *sequence, const kvc_token_span *tokens,
                           int is_exact) {
    kvc_node *node = kvc_node_find(parent, tokens);
    if (node && (!is_exact || node->tokens.num == tokens->num)) return node;
    node = kvc_node_child(parent, tokens);
    return node && kvc_node_is_live(node) && !adds_rows(sequence, node) ? node : NULL;
}

/* Keeps these tokens of a sequence, behind `parent`, and returns their block, as a user of it.  The block has no rows
 * if windows have lost them all.  NULL if memory is short. */
static kvc_node *keep_block(kvc_node *parent, const kvc_sequence *sequence, kvc_session *session,
                            const kvc_token_span *tokens, int is_exact) {
    const int32_t end = parent->end + tokens->num;
    kvc_node *own = session ? session->pending : NULL, *list = NULL; /* own: the pending block of these tokens */
    if (own && (own->begin != parent->end || own->end != end)) own = NULL;
    if (own && adds_rows(sequence, own)) { /* its windows were evicted, and the sequence still has their sink tokens */
        kvc_node_drop(own);
        own = NULL;
    }
    kvc_node *node = find_kept(parent, own ? own->rows : sequence, tokens, is_exact);
    if (node) {
        if (own) kvc_node_drop(own);
    } else {
        const kvc_node *longer = own ? NULL : kvc_node_find(parent, tokens); /* windows of the sequence may be ahead */
        const kvc_sequence *source = longer ? longer->rows : sequence;
        if (!own && kvc_node_new(parent->tree, source, parent->end, end, &list, &own) != KVC_OK) return NULL;
        node = own ? add_now(parent, own, tokens) : kvc_tree_add_empty(parent, tokens);
    }
    if (node) kvc_node_use(node, 1);
    return node;
}

/* Ends the use of nodes from one up to the root; returns the first that has rows, or the root. */
static kvc_node *unuse_path(kvc_node *node) {
    kvc_node *found = node;
    while (found->parent && !found->rows) found = found->parent;
    for (kvc_node *parent; node->parent; node = parent) {
        parent = node->parent;
        kvc_node_use(node, -1); /* which may free it */
    }
    return found;
}

kvc_node *kvc_session_keep(kvc_prefix *prefix, kvc_sequence *sequence, const kvc_tokens *tokens, int is_exact,
                           int *is_short) {
    const int32_t block = prefix->cache->pools[0].block_size, length = (int32_t)tokens->num_tokens;
    kvc_session *session = kvc_session_of(prefix, sequence);
    kvc_node *last = &prefix->tree->root;
    if (session) {
        note_edits(session, INT32_MAX);
        turn_pending(session); /* the first ones come first */
    }
    if (is_short) *is_short = 0;
    while (last->end < length) {
        const int32_t end = length - last->end > block ? last->end + block : length;
        const kvc_token_span part = kvc_tokens_part(tokens, last->end, end);
        kvc_node *node = keep_block(last, sequence, session, &part, is_exact);
        if (!node && is_short) *is_short = 1;
        if (!node) break;
        last = node;
        if (part.num < block) break;
    }
    if (session) turn_pending(session);
    return unuse_path(last);
}
