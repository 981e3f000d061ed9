/* attention.h: attention of a model's tokens over a kvcache.  attention.c is all of this runner that uses kvcache.h. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <kvcache.h>

#include "model.h"

typedef struct attention {
    const model *m;
    pool *pool;
    int num_threads;
    int use_openmp; /* the library's own threads attend, not the pool's */
    int type;       /* kvc_type of the rows */
    kvc_cache *cache;
    double *inv_freq;     /* [head_dim / 2] radians per position */
    float *cosine, *sine; /* [BATCH][head_dim / 2] of the batch's positions */
    kvc_batch *batch;     /* the open one, */
    kvc_plan *plan;       /* and its tasks, for the pool */
} attention;

/* Makes a cache for one sequence of a model, with rows of a kvc_type; each token sees `window` tokens, 0: all.
 * Returns 0, or what fail returns; call attention_destroy either way. */
int attention_init(attention *a, const model *m, pool *p, int num_threads, int use_openmp, int type, int window);
void attention_destroy(attention *a);

/* A forward pass of n tokens, at most BATCH, begins, attends in each layer, and ends.  The end makes the tokens part of
 * the sequence if status is 0, and otherwise undoes everything.  qkv [n][num_heads + 2 num_kv_heads][head_dim], out
 * [n][num_heads][head_dim].  They return 0, or the result of fail; the end returns status, if that is not 0. */
int attention_begin(attention *a, int n);
int attention_attend(attention *a, int layer, int n, float *qkv, float *out);
int attention_end(attention *a, int status);

#endif
