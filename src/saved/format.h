/* format.h: the file that kvc_save writes, in version 1: docs/format.md specifies it to the byte.
 *
 * It is a safetensors file: the length of a header, the header, which is JSON, and tensors.  The first tensors are
 * tables, one behind the other, then come rows, then checksums.  The header follows from the tables, so a reader needs
 * no parser of JSON.  It compares the header with the header that kvc_format_header would write.
 */
#ifndef KVC_FORMAT_H
#define KVC_FORMAT_H

#include "base/compiler.h"
#include "kvcache.h"

enum {
    KVC_FORMAT_VERSION = 1,       /* the newest, which is written */
    KVC_FORMAT_ALIGNMENT = 64,    /* bytes; of where tensors begin in the file */
    KVC_FORMAT_PIECE = 256 << 10, /* bytes of a tensor that are hashed together */
    KVC_MOST_HEADER = 100000000,  /* bytes; safetensors refuses longer ones */
    KVC_MOST_FINGERPRINT = 255    /* characters */
};

/* Rows of the tables.  All fields are int64, little-endian. */
typedef struct kvc_saved_state {
    int64_t num_layers, num_groups, num_sequences, num_runs, num_freqs, num_tokens;
    int64_t block_size, max_seq_len, max_sequences, capacity, max_bytes;
    int64_t reserved[5]; /* 0 */
} kvc_saved_state;

typedef struct kvc_saved_layer {
    int64_t num_kv_heads, k_dim, v_dim, k_type, v_type, k_transform, v_transform, value_in_key, share;
    int64_t group;
    int64_t kind, window, num_sink_tokens, resume_window, attention_chunk_size, max_len; /* kvc_policy */
    int64_t rope, interleaved, first_dim, num_freqs; /* kvc_rope, of which `rope` is the kind */
    int64_t first_freq;                              /* its frequencies begin there in the table of frequencies */
    int64_t stride;                                  /* of kvc_policy; 0 for 1 */
    int64_t reserved[2];                             /* 0 */
} kvc_saved_layer;

typedef struct kvc_saved_sequence {
    int64_t id, num_tokens;
} kvc_saved_sequence;

/* A holding: the rows of a sequence in a layer group. */
typedef struct kvc_saved_holding {
    int64_t num_runs, lost_begin, lost_end, missing_begin, missing_end; /* kvc_run_list */
} kvc_saved_holding;

typedef struct kvc_saved_run {
    int64_t row, count, position,
        delta; /* row: the first, counted among the group's rows in the file.  position: as in kvc_run */
} kvc_saved_run;

/* The tables, and what else the header says. */
typedef struct kvc_format {
    kvc_saved_state *state;
    kvc_saved_layer *layers;       /* [num_layers] */
    int64_t *group_rows;           /* [num_groups] number of rows in the file */
    double *inv_freq;              /* [num_freqs] */
    kvc_saved_sequence *sequences; /* [num_sequences] by rising id */
    kvc_saved_holding *holdings;   /* [num_sequences][num_groups] */
    kvc_saved_run *runs;           /* [num_runs] of each holding, one after the other */
    int64_t *tokens;               /* [num_tokens] of each sequence, one after the other */
    int64_t *exact_to;             /* [num_sequences] kvc_sequence: rows below that position are exact */
    uint64_t *checksum;            /* kvc_hash of the tables before it, with the header's hash as the seed */
    char library[16];              /* version of the library that wrote it */
    char fingerprint[KVC_MOST_FINGERPRINT + 1];
} kvc_format;

typedef enum kvc_tensor_kind {
    KVC_TABLE,
    KVC_ROWS,
    KVC_PADDING, /* zeros, so that the next tensor is aligned */
    KVC_CHECKSUMS,
    KVC_MAC
} kvc_tensor_kind;

typedef struct kvc_tensor {
    kvc_tensor_kind kind;
    char name[48];
    const char *dtype; /* as safetensors calls it */
    int32_t rank;
    int64_t shape[3];
    uint64_t begin, size;              /* bytes; begin counts from the first tensor on */
    int32_t layer, is_value, is_scale; /* of rows: which they are, or whose scales */
} kvc_tensor;

/* Returns the bytes of all tables, with padding and their checksum; UINT64_MAX if a count is negative,
 * or a table larger than `most` bytes. */
uint64_t kvc_format_tables_bytes(const kvc_saved_state *state, uint64_t most);

/* Sets the pointers to where the tables lie, the first at `start`, which is aligned. */
void kvc_format_place(kvc_format *format, void *start);

/* Calls visit for every tensor, in the order of the file, until it returns something else than KVC_OK, which is then
 * returned.  KVC_ERR_FORMAT where tensors would reach beyond byte `most`. */
typedef kvc_status kvc_tensor_fn(void *context, const kvc_tensor *tensor);
kvc_status kvc_format_visit(const kvc_format *format, uint64_t most, kvc_tensor_fn *visit, void *context);

/* Writes the file's first bytes, up to the first tensor, or as many of them as `size`.  Returns how many there are. */
uint64_t kvc_format_header(const kvc_format *format, char *to, uint64_t size);

/* Checks the version, and reads library and fingerprint, in a header of `size` bytes.  KVC_ERR_FORMAT. */
kvc_status kvc_format_read_strings(kvc_format *format, const char *header, uint64_t size);

/* Returns whether a fingerprint can stand in the header: printable ASCII without quotes and backslashes. */
int kvc_is_fingerprint(const char *text);

#endif
