/* choices.h: rows chosen by chance (kvc_chosen), for the tokens of a stage (scene.h), and what they name. */
#ifndef KVC_TEST_CHOICES_H
#define KVC_TEST_CHOICES_H

#include "support/answers.h"

enum { MAX_WIDTH = 4096 };

/* A choice for all tokens of a stage's batch, with room for more entries behind each list. */
typedef struct choice {
    int num_tokens, num_choices, width, block, tail, stride;
    int32_t positions[MAX_PASS]; /* of the tokens */
    int32_t entries[MAX_NEW * 2][MAX_KV_HEADS][MAX_WIDTH];
} choice;

static choice chosen;

enum { MAX_NAMED = 1 << 13 };                            /* positions are below */
static char named[MAX_NEW * 2][MAX_KV_HEADS][MAX_NAMED]; /* which positions the choice names */

static inline int is_chosen(int t, int kv_head, int32_t position) {
    CHECK(position < MAX_NAMED);
    const char *by = named[t][chosen.num_choices > 1 ? kv_head : 0];
    int num = 0, of = 0; /* positions that the row stands for */
    do num += by[position - of];
    while (++of < chosen.stride);
    return num > 0;
}

/* Fills in `named`. */
static inline void name_positions(void) {
    const int64_t block = chosen.block ? chosen.block : 1;
    memset(named, 0, sizeof named);
    for (int t = 0; t < chosen.num_tokens; t++)
        for (int c = 0; c < chosen.num_choices; c++) {
            for (int i = 0; i < chosen.width; i++)
                for (int64_t p = chosen.entries[t][c][i] * block, n = 0; p >= 0 && p < MAX_NAMED && n < block; n++)
                    named[t][c][p++] = 1;
            if (!chosen.tail) continue;
            for (int64_t p = (chosen.positions[t] + 1) / block * block; p < MAX_NAMED; p++) named[t][c][p] = 1;
        }
}

/* ---- choices by chance ------------------------------------------------------------------------------------------- */

static inline int by_value(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Entries of a list in any order, or ascending with -1 behind; some repeat, some name no row. */
static inline void fill_list(int32_t *entries, int width, int num_entries) {
    const int kind = random_int(0, 4), num = random_int(0, 5) ? width : random_int(0, width + 1);
    for (int i = 0; i < width; i++) {
        entries[i] = kind == 1 ? i : random_int(0, num_entries);
        if (!random_int(0, 40)) entries[i] = random_int(0, 2) ? -1 - random_int(0, 9) : INT32_MAX - random_int(0, 9);
    }
    for (int i = num; i < width; i++) entries[i] = -1;
    if (kind > 1) qsort(entries, (size_t)num, sizeof *entries, by_value);
}

static inline void random_choice(const stage *st) {
    static const int widths[] = {1, 3, 40, 300, 600, 1300, 2500}, blocks[] = {0, 1, 1, 3, 16, 128, 5000};
    const int num = st->tokens.n;
    int32_t largest = 0;
    CHECK(num <= MAX_NEW * 2);
    for (int t = 0; t < num; t++)
        if (st->tokens.positions[t] > largest) largest = st->tokens.positions[t];
    chosen.num_tokens = num;
    chosen.stride = scene_stride(st->scene);
    chosen.num_choices = random_int(0, 2) ? 1 : st->scene->layer.num_kv_heads;
    chosen.block = one_of(blocks, 7);
    chosen.width = chosen.block > 1 ? random_int(1, 40) : one_of(widths, num > 40 ? 5 : 7);
    chosen.tail = random_int(0, 2);
    memcpy(chosen.positions, st->tokens.positions, (size_t)num * sizeof *chosen.positions);
    for (int t = 0; t < num; t++)
        for (int c = 0; c < chosen.num_choices; c++)
            fill_list(chosen.entries[t][c], chosen.width, largest / (chosen.block ? chosen.block : 1) + 3);
}

/* Points a question at the choice. */
static inline kvc_chosen choice_for(question *a) {
    a->plan.masked = a->stage->scene->masked;
    a->plan.masked_size = sizeof *a->stage->scene->masked;
    a->plan.num_masked = a->stage->scene->num_masked;
    return (kvc_chosen){.struct_size = sizeof(kvc_chosen),
                        .positions = chosen.entries[a->first][0],
                        .token_stride = sizeof chosen.entries[0],
                        .choice_stride = sizeof chosen.entries[0][0],
                        .num_choices = chosen.num_choices,
                        .width = chosen.width,
                        .block = chosen.block,
                        .tail = chosen.tail};
}

/* Compares answers with arithmetic over the rows that the choice names. */
static inline void check_chosen_answers(const question *a) {
    name_positions();
    chooses = is_chosen;
    check_answers(a);
    chooses = NULL;
}

#endif
