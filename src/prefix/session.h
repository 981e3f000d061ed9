/* session.h: the sequences that a prefix has acquired: the blocks that they fill are kept for prompts to come.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_SESSION_H
#define KVC_SESSION_H

#include "cache/batch.h"
#include "prefix/tree.h"

/* The follower of an acquired sequence. */
typedef struct kvc_session {
    kvc_follower follower; /* first, so that its address is that of the session */
    struct kvc_prefix *prefix;
    kvc_sequence *sequence;
    kvc_node *last;                 /* the last block of the tree that is known to be one of the sequence's */
    int32_t kept_to;                /* position up to which its blocks are in the tree, or in `pending` */
    int32_t known_to;               /* position up to which `prompt` has the tokens of its blocks */
    kvc_node *pending;              /* list of its blocks whose tokens are not known yet, the last ones first */
    kvc_checkpoint *state;          /* of the model behind what was matched, until tokens are fed; NULL: none */
    uint64_t num_bytes;             /* of this allocation */
    int64_t counted_bytes;          /* what it counts for max_bytes: its tokens that were not matched */
    struct kvc_session *next, **at; /* place in the list of the prefix */
    kvc_token_span first;           /* the prompt's first token */
    int32_t begin;                  /* position of the first token in `prompt` */
    kvc_tokens prompt;              /* tokens that the sequence is to be fed, from the beginning of a block on */
} kvc_session;

/* Makes the session of a sequence that is to hold the prompt's tokens up to `matched` and to be fed the others; NULL
 * if out of memory.  Frees a session that has not begun. */
kvc_session *kvc_session_new(struct kvc_prefix *prefix, const kvc_tokens *tokens, int32_t matched);
void kvc_session_free(kvc_session *session);

/* Attaches the session to a sequence.  Its full blocks up to `last` are in the tree already.  Takes a reference to
 * the state of the model (NULL: no recurrent state). */
void kvc_session_begin(kvc_session *session, kvc_sequence *sequence, kvc_node *last, kvc_checkpoint *state);

/* Returns the sequence's session of this prefix; NULL if it has none. */
kvc_session *kvc_session_of(const struct kvc_prefix *prefix, const kvc_sequence *sequence);

/* Returns whether a prefix may keep a block or a state of a sequence that begins with a token.  Once the prefix has
 * forgotten a prompt, it keeps nothing of older sequences, and nothing of sequences that another prefix has acquired.
 * These may hold rows of that prompt.  While it forgets a prompt, it keeps nothing that begins alike. */
int kvc_prefix_may_keep(const struct kvc_prefix *prefix, const kvc_sequence *sequence, kvc_token_span first);

/* Drops all blocks that sequences of a prefix have filled with tokens that it does not know yet. */
void kvc_sessions_drop_pending(const struct kvc_prefix *prefix);

/* Notes that the tokens of the sequence from a position on differ from the given tokens. */
void kvc_session_roll_back(kvc_session *session, int32_t position);

/* Keeps the blocks of any sequence that its first tokens, which are now known, fill, and the block that they end in.
 * Unless is_exact, a longer block that begins with that one will do.  Returns the last one with rows, perhaps the
 * root.  Sets *is_short, unless it is NULL, to whether memory was short for a block. */
kvc_node *kvc_session_keep(struct kvc_prefix *prefix, kvc_sequence *sequence, const kvc_tokens *tokens, int is_exact,
                           int *is_short);

/* Keeps the blocks of acquired sequences that a batch fills.  This is done before its tokens become theirs, because
 * some rows expire then.  If only some tokens are kept, it is done afterwards. */
void kvc_sessions_fill(const kvc_batch *batch);

#endif
