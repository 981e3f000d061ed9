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
    FAR = 1000,                 /* positions: rotations by as many right angles are not quite exact */
    ARRAY = 2 * TOKENS * QUERY_HEADS * MOST_CHOSEN * (int)sizeof(float)
};

/* An array with a row for each of some tokens and heads, in one of many layouts. */
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
    const kvc_batch *batch;
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
    array q, out, lse, prior_out, prior_lse, lists, weights, scores;
} question;

/* ---- arrays */

void lay_out(array *a, int num, int inner, int heads, int64_t row); /* token or head major, backwards, with gaps */
char *row_in(array *a, int n, int head);
void write_floats(array *a, int n, int head, const float *x, int num, int32_t type);
float read_float(int32_t type, const char *at);
int is_unwritten(const char *at, int64_t size);
void check_gaps(const question *q, array *a, int heads, int64_t row);

/* ---- questions: for tokens [first, first + num) of a batch */

void make_plan(question *q, const batch *of, int layer, int first, int num);
void make_question(question *q); /* after its plan */
void make_lists(question *q, int heads, int width, int block);
void make_choosing(question *q);

/* Queries of whole numbers times a power of two: dense ones without zeros, which rotations by right angles would leave
 * not quite 0, or of one element that no rope turns.  Then scores tie. */
void make_queries(question *q, float unit, int is_sparse);
void make_numbers(float x[][QUERY_HEADS][DIM], int num, int num_heads, float unit, int is_sparse);
void write_numbers(array *a, float x[][QUERY_HEADS][DIM], int num, int inner, int num_heads, int dim, int32_t type);

/* ---- answers */

int is_far_off(int32_t position, int32_t tag); /* whether a row has moved so far that its key is not quite exact */
int is_known(const batch *of, int t);          /* whether anybody knows which rows a token sees */
int list_shown(const batch *of, int s, int l, shown *to);
int sees(const question *q, int t, const shown *row);
int list_seen(const question *q, int t, shown *to);
void sort_by_position(shown *rows, int num); /* and at one position by arrival */
unsigned right_statuses(const question *q);  /* as bits */
void check_answers(question *q, int partly); /* partly: what was not written is no answer yet */
void check_choices(question *q, int partly);
void check_alone(question *q); /* compares answers to tokens of several sequences with those of each alone */

/* ---- selected rows */

int select_plainly(const question *q, int t, int num_seen); /* whether a token that sees so many rows selects some */

/* Marks which rows that a token sees, in order of their positions, it reads for a KV head.  Returns 0 if rounding
 * decides. */
int mark_reads(const question *q, const kvc_batch *batch, int t, int kv, uint8_t *reads);

#endif
