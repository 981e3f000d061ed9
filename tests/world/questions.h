/* questions.h: what tokens of a batch ask a layer, and what is right, by the oracle's lists of rows (attention.h). */
#ifndef WORLD_QUESTIONS_H
#define WORLD_QUESTIONS_H

#include "attention.h"
#include "packing.h"

enum {
    QUERY_HEADS = 2 * HEADS, /* most */
    MOST_MASKED = 3,
    MOST_CHOSEN = 40,           /* entries of a choice, and positions that it may name */
    MOST_SHOWN = ROWS + TOKENS, /* rows of a sequence, with a batch's */
    ARRAY = 2 * TOKENS * QUERY_HEADS * MOST_CHOSEN * (int)sizeof(float)
};

/* Rows of tokens and heads, in one of many layouts. */
typedef struct array {
    _Alignas(float) char bytes[ARRAY];
    int64_t token_stride, head_stride, batch_stride; /* as they are given: 0 may stand for the default */
    int64_t token, head, batch, start;
    int inner; /* tokens in a batch stride */
} array;

/* A row that a token may see. */
typedef struct shown {
    int32_t position, tag;
    int token; /* its index in the batch; -1: it is stored */
} shown;

typedef struct question {
    const batch *of;
    int layer, first, num, num_heads; /* of query tokens */
    int inner;                        /* tokens_per_sequence */
    int num_choices;
    int32_t out_type, cancel;
    kvc_plan_args plan;
    kvc_attend_args args;
    kvc_chosen chosen;
    kvc_choose_args choosing; /* in a layer of keys alone */
    kvc_masked masked[MOST_MASKED];
    uint8_t non_causal[TOKENS];
    float numbers[TOKENS][QUERY_HEADS][DIM]; /* the queries' */
    float sinks[QUERY_HEADS], alibi[QUERY_HEADS], head_weights[TOKENS][QUERY_HEADS];
    int32_t entries[TOKENS][QUERY_HEADS][MOST_CHOSEN]; /* that are chosen, or among which tokens choose */
    float prior[TOKENS][QUERY_HEADS][DIM];
    array q, out, lse, prior_out, prior_lse, lists, weights, scores, chosen_now;
} question;

/* Asks by chance for tokens [first, first + num) of a batch. */
void make_plan(question *q, const batch *of, int layer, int first, int num);
void make_question(question *q); /* after its plan */

int is_known(const batch *of, int t);        /* whether anybody knows which rows a token sees */
unsigned right_statuses(const question *q);  /* as bits */
void check_answers(question *q, int partly); /* partly: what was not written is no answer yet */
int list_shown(const batch *of, int s, int l, shown *to);
int sees(const question *q, int t, const shown *row);

#endif
