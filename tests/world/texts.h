/* texts.h: tokens, and texts.  A node of one tree stands for a text, and for the last token of it; node 0 is empty.
 * Tokens are few, so that texts often begin alike.  Some have digests, of which some look like ids. */
#ifndef WORLD_TEXTS_H
#define WORLD_TEXTS_H

#include <stdint.h>

#include "kvcache.h"

enum { SYMBOLS = 6, MOST_TEXT = 60, MOST_TEXTS = 1 << 18 };

typedef struct text_tokens {
    kvc_tokens tokens;
    int64_t ids[MOST_TEXT];
    uint8_t digests[MOST_TEXT][KVC_NAME_BYTES];
} text_tokens;

/* Returns the text that a token makes of another. */
int text_behind(int node, int symbol);
int text_length(int node);
int text_symbol(int node);

/* Returns the first `length` tokens of a text. */
int text_begin(int node, int length);

/* Returns the number of tokens with which both texts begin. */
int text_common(int a, int b);

/* Fills in the tokens of a text.  junk: what stands below digests, which counts for nothing. */
const kvc_tokens *tokens_of(int node, int64_t junk, text_tokens *out);

/* Forgets all texts. */
void forget_texts(void);

/* Lets children of this process add texts that it knows. */
void share_texts(void);

/* Writes a text in letters, for messages; four of them stay. */
const char *spell(int node);

#endif
