/* model.h: a Llama in f32: its files, and all of a forward pass that knows nothing of a cache. */
#ifndef MODEL_H
#define MODEL_H

#include "pool.h"

enum { BATCH = 128, VOCAB = 256 }; /* the most tokens of a forward pass; different tokens, which are bytes */

typedef struct layer {
    float *attention_norm; /* [hidden] */
    float *qkv;            /* [(num_heads + 2 num_kv_heads) * head_dim][hidden]: queries, keys, values */
    float *out;            /* [hidden][num_heads * head_dim] */
    float *mlp_norm;       /* [hidden] */
    float *gate_up;        /* [2 intermediate][hidden]: gates, then what they multiply */
    float *down;           /* [hidden][intermediate] */
} layer;

typedef struct model {
    int num_layers, num_heads, num_kv_heads, head_dim, hidden, intermediate, max_seq_len;
    double rms_norm_eps, rope_theta;
    int qkv_dim; /* (num_heads + 2 num_kv_heads) * head_dim */

    float *weights;   /* all of them; the pointers below point into it */
    float *embedding; /* [VOCAB][hidden] */
    layer *layers;    /* [num_layers] */
    float *norm;      /* [hidden] */
    float *head;      /* [VOCAB][hidden]: the embedding */
} model;

/* Reads folder/config.json and folder/model.safetensors, whose tensors are f16.  Trusts what these files say otherwise.
 * Returns 0, or what fail returns; call model_free either way. */
int model_read(model *m, const char *folder);
void model_free(model *m);

/* The dot product of n floats. */
float dot(const float *a, const float *b, int n);

/* The name of the program, which its main file gives. */
extern const char program[];

/* Says on stderr, in one sentence, what cannot be done; returns the exit status for that, 2. */
int fail(const char *format, ...);

/* The arrays of a forward pass of n tokens, at most BATCH. */
typedef struct state {
    float *memory;   /* all of it; the pointers below point into it */
    float *x;        /* [n][hidden] the residual stream */
    float *normed;   /* [n][hidden] */
    float *qkv;      /* [n][num_heads + 2 num_kv_heads][head_dim] */
    float *attended; /* [n][num_heads][head_dim] */
    float *gate_up;  /* [n][2 intermediate] */
    float *logits;   /* [VOCAB] */
} state;

/* Returns 0 if there is no memory. */
int state_init(state *s, const model *m);
void state_destroy(state *s);

/* The parts of a forward pass, in the order of their use.  Between the second and the third of each layer, the keys and
 * values in qkv are stored, and the queries attend. */
void model_embed(const model *m, state *s, const unsigned char *tokens, int n); /* tokens -> x */
void model_qkv(const model *m, state *s, pool *p, int layer, int n);            /* x -> qkv */
void model_finish(const model *m, state *s, pool *p, int layer, int n);         /* x, attended -> x */
void model_logits(const model *m, state *s, pool *p, int n);                    /* x of the last token -> logits */

/* Returns the token with the largest logit. */
unsigned char likeliest(const float *logits);

#endif
