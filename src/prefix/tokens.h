/* tokens.h: the tokens of a block, their order, and the names of blocks.
 *
 * A name is BLAKE2b of the name of the block before and of the block's tokens, keyed with a tenant's salt.  Whoever
 * lacks the salt can neither name a block nor tell from names what was asked. */
#ifndef KVC_TOKENS_H
#define KVC_TOKENS_H

#include "kvcache.h"

/* Consecutive tokens, which stand elsewhere. */
typedef struct kvc_token_span {
    const int64_t *ids;
    const uint8_t *digests; /* [num][KVC_NAME_BYTES], all 0: the id counts; NULL: all ids count */
    int32_t num;
} kvc_token_span;

/* Returns [begin, end) of a caller's tokens, as far as there are as many. */
kvc_token_span kvc_tokens_part(const kvc_tokens *tokens, int64_t begin, int64_t end);

/* Returns the digest of a token; NULL: its id counts. */
const uint8_t *kvc_tokens_digest(const kvc_token_span *tokens, int32_t i);

/* Returns the number of tokens that both begin with. */
int32_t kvc_tokens_common(const kvc_token_span *a, const kvc_token_span *b);

/* Compares tokens in lexicographic order: returns a number below 0 if a stands before b, 0 if both are the same, above
 * 0 otherwise.  If b begins with a, a stands before it.  Neighbours in this order have the most tokens in common. */
int kvc_tokens_compare(const kvc_token_span *a, const kvc_token_span *b);

/* Sets the name of a tenant, the key of all other names; and the name that the first block's follows.  Blocks of other
 * state_bytes have no states, or larger ones. */
void kvc_name_salt(const void *salt, size_t size, uint8_t *name);
void kvc_name_root(const uint8_t *salt, const void *identity, size_t size, int64_t state_bytes, uint8_t *name);

/* Sets the name of the block of these tokens, which follows the block named `parent`. */
void kvc_name_block(const uint8_t *salt, const uint8_t *parent, const kvc_token_span *tokens, uint8_t *name);

/* Sets the names of `num` blocks, which follow each other from token `begin` on, the first after the block named
 * `parent`. */
void kvc_name_blocks(const uint8_t *salt, const uint8_t *parent, const kvc_tokens *tokens, int64_t begin,
                     int32_t block_size, int64_t num, uint8_t *names);

#endif
