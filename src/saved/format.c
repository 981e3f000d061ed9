/* format.c: lists the tensors of a saved state, and writes its header.  A saved state is a safetensors file: 8 bytes
 * with the length of the header, the header, which is JSON, and tensors.  The first tensors are tables, the others rows
 * of layers, checksums and a MAC.  Each but the MAC is padded. */
#include "saved/format.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/align.h"
#include "base/compiler.h"
#include "base/dtype.h"
#include "base/status.h"

/* ---- tables ------------------------------------------------------------------------------------------------------ */

enum { STATE, LAYERS, GROUPS, FREQUENCIES, SEQUENCES, HOLDINGS, RUNS, TOKENS, EXACT_TO, CHECKSUM, NUM_TABLES };

typedef struct table {
    const char *name, *dtype;
    int64_t num, groups; /* groups: of holdings, num is a number of sequences; else 0 */
    int32_t columns;     /* 8 bytes each; 0: the table has one column, and one dimension */
} table;

/* Returns a table's description; the numbers of its rows come from the table STATE. */
static table table_at(const kvc_saved_state *state, int32_t i) {
    switch (i) {
    case STATE: return (table){"state", "I64", 1, 0, sizeof *state / 8};
    case LAYERS: return (table){"layers", "I64", state->num_layers, 0, sizeof(kvc_saved_layer) / 8};
    case GROUPS: return (table){"group_rows", "I64", state->num_groups, 0, 0};
    case FREQUENCIES: return (table){"inv_freq", "F64", state->num_freqs, 0, 0};
    case SEQUENCES: return (table){"sequences", "I64", state->num_sequences, 0, sizeof(kvc_saved_sequence) / 8};
    case HOLDINGS:
        return (table){"holdings", "I64", state->num_sequences, state->num_groups, sizeof(kvc_saved_holding) / 8};
    case RUNS: return (table){"runs", "I64", state->num_runs, 0, sizeof(kvc_saved_run) / 8};
    case TOKENS: return (table){"tokens", "I64", state->num_tokens, 0, 0};
    case EXACT_TO: return (table){"exact_to", "I64", state->num_sequences, 0, 0};
    default: return (table){"checksum", "U64", 1, 0, 0};
    }
}

static uint64_t table_bytes(const table *t) {
    return (uint64_t)t->num * (uint64_t)(t->columns ? t->columns : 1) * 8 * (uint64_t)(t->groups ? t->groups : 1);
}

uint64_t kvc_format_tables_bytes(const kvc_saved_state *state, uint64_t most) {
    uint64_t bytes = 0;
    for (int32_t i = 0; i < NUM_TABLES; i++) {
        const table t = table_at(state, i);
        const uint64_t columns = (uint64_t)(t.columns ? t.columns : 1) * 8;
        if (t.num < 0 || t.groups < 0 || (uint64_t)t.num > most / columns) return UINT64_MAX;
        if (t.num && (uint64_t)t.groups > most / columns / (uint64_t)t.num) return UINT64_MAX;
        bytes += kvc_align_up(table_bytes(&t), KVC_FORMAT_ALIGNMENT);
        if (bytes > most) return UINT64_MAX;
    }
    return bytes;
}

void kvc_format_place(kvc_format *format, void *start) {
    char *at[NUM_TABLES] = {0}; /* GCC 12 with -O3 does not see that the loop sets them all */
    uint64_t offset = 0;
    for (int32_t i = 0; i < NUM_TABLES; i++) {
        const table t = table_at(start, i); /* the table STATE comes first */
        at[i] = (char *)start + offset;
        offset += kvc_align_up(table_bytes(&t), KVC_FORMAT_ALIGNMENT);
    }
    format->state = (void *)at[STATE];
    format->layers = (void *)at[LAYERS];
    format->group_rows = (void *)at[GROUPS];
    format->inv_freq = (void *)at[FREQUENCIES];
    format->sequences = (void *)at[SEQUENCES];
    format->holdings = (void *)at[HOLDINGS];
    format->runs = (void *)at[RUNS];
    format->tokens = (void *)at[TOKENS];
    format->exact_to = (void *)at[EXACT_TO];
    format->checksum = (void *)at[CHECKSUM];
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

typedef struct listing {
    const kvc_format *format;
    uint64_t at, most; /* bytes, from the first tensor on */
    int64_t num_rows;  /* number of tensors of rows so far */
    kvc_tensor_fn *visit;
    void *context;
} listing;

static kvc_status visit_one(listing *l, kvc_tensor *tensor) {
    tensor->begin = l->at;
    if (tensor->size > l->most - l->at)
        return kvc_fail(KVC_ERR_FORMAT, "the file is truncated: tensor %s does not fit in it", tensor->name);
    l->at += tensor->size;
    return l->visit(l->context, tensor);
}

/* Visits a tensor, and the padding behind it. */
static kvc_status visit_padded(listing *l, kvc_tensor *tensor) {
    const uint64_t rest = kvc_align_up(tensor->size, KVC_FORMAT_ALIGNMENT) - tensor->size;
    const kvc_status status = visit_one(l, tensor);
    if (status != KVC_OK || !rest) return status;
    kvc_tensor padding = {.kind = KVC_PADDING, .dtype = "U8", .rank = 1, .shape = {(int64_t)rest}, .size = rest};
    snprintf(padding.name, sizeof padding.name, "%.36s.padding", tensor->name);
    return visit_one(l, &padding);
}

static kvc_status visit_table(listing *l, const table *t, kvc_tensor_kind kind) {
    kvc_tensor tensor = {.kind = kind, .dtype = t->dtype, .size = table_bytes(t)};
    tensor.shape[tensor.rank++] = t->num;
    if (t->groups) tensor.shape[tensor.rank++] = t->groups;
    if (t->columns) tensor.shape[tensor.rank++] = t->columns;
    snprintf(tensor.name, sizeof tensor.name, "%s", t->name);
    return visit_padded(l, &tensor);
}

/* Visits the keys, or the values, of a layer: [num_kv_heads][rows][elements], or [bytes] for types that safetensors
 * does not know.  With is_scale, visits their row scales: [num_kv_heads][rows]. */
static kvc_status visit_rows(listing *l, int32_t layer, int32_t is_value, int32_t is_scale) {
    static const char *const dtypes[KVC_STORED_TYPES] = {
        [KVC_F32] = "F32", [KVC_F16] = "F16", [KVC_BF16] = "BF16", [KVC_INT8] = "I8"};
    const kvc_saved_layer *config = &l->format->layers[layer];
    const int32_t type = (int32_t)(is_value ? config->v_type : config->k_type),
                  dim = (int32_t)(is_value ? config->v_dim : config->k_dim);
    const uint64_t row_bytes = is_scale ? kvc_row_scale_bytes(type) : kvc_blocks_bytes(type, dim),
                   bytes = row_bytes * (uint64_t)config->num_kv_heads, /* below 2^43 */
        rows = (uint64_t)l->format->group_rows[config->group];
    if (!bytes) return KVC_OK;
    kvc_tensor tensor = {.kind = KVC_ROWS,
                         .dtype = is_scale       ? "F16"
                                  : dtypes[type] ? dtypes[type]
                                                 : "U8",
                         .rank = is_scale ? 2 : 3,
                         .shape = {config->num_kv_heads, (int64_t)rows, dtypes[type] ? dim : (int64_t)row_bytes},
                         .layer = layer,
                         .is_value = is_value,
                         .is_scale = is_scale};
    snprintf(tensor.name, sizeof tensor.name, "layer.%d.%s%s", layer, is_value ? "v" : "k", is_scale ? ".scale" : "");
    if (rows > l->most / bytes)
        return kvc_fail(KVC_ERR_FORMAT, "the file is truncated: tensor %s does not fit in it", tensor.name);
    tensor.size = rows * bytes;
    l->num_rows++;
    return visit_padded(l, &tensor);
}

kvc_status kvc_format_visit(const kvc_format *format, uint64_t most, kvc_tensor_fn *visit, void *context) {
    listing l = {.format = format, .most = most, .visit = visit, .context = context};
    kvc_status status = KVC_OK;
    for (int32_t i = 0; status == KVC_OK && i < NUM_TABLES; i++) {
        const table t = table_at(format->state, i);
        status = visit_table(&l, &t, KVC_TABLE);
    }
    for (int32_t i = 0; status == KVC_OK && i < format->state->num_layers; i++) {
        const kvc_saved_layer *layer = &format->layers[i];
        if (layer->share || layer->kind == KVC_NONE) continue;
        const int32_t parts = layer->v_dim && !layer->value_in_key ? 4 : 2; /* keys, their scales, values, theirs */
        for (int32_t part = 0; status == KVC_OK && part < parts; part++) status = visit_rows(&l, i, part / 2, part % 2);
    }
    if (status != KVC_OK) return status;
    const table checksums = {"checksums", "U64", l.num_rows, 0, 0};
    KVC_TRY(visit_table(&l, &checksums, KVC_CHECKSUMS));
    kvc_tensor mac = {.kind = KVC_MAC, .name = "mac", .dtype = "U8", .rank = 1, .shape = {KVC_MAC_BYTES}};
    mac.size = KVC_MAC_BYTES;
    return visit_one(&l, &mac);
}

/* ---- the header -------------------------------------------------------------------------------------------------- */

typedef struct text {
    char *to;
    uint64_t size, length; /* length: what would be there, had it all fit */
} text;

/* Adds text, as far as it fits; counts all of it. */
static void KVC_PRINTF(2, 3) add(text *out, const char *format, ...) {
    char piece[KVC_MOST_FINGERPRINT + 256];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    for (int i = 0; i < n; i++, out->length++)
        if (out->length < out->size) out->to[out->length] = piece[i];
}

/* Adds a tensor to the header.  Something stands before it, at least the metadata: so it begins with a comma. */
static kvc_status add_tensor(void *context, const kvc_tensor *tensor) {
    text *out = context;
    add(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", tensor->name, tensor->dtype);
    for (int32_t i = 0; i < tensor->rank; i++) add(out, "%s%lld", i ? "," : "", (long long)tensor->shape[i]);
    add(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)tensor->begin,
        (unsigned long long)(tensor->begin + tensor->size));
    return KVC_OK;
}

/* The text between the strings in the header's beginning. */
static const char BEGINNING[] = "{\"__metadata__\":{\"format\":\"kvcache\",\"version\":\"",
                  LIBRARY[] = "\",\"library\":\"", FINGERPRINT[] = "\",\"fingerprint\":\"", ENDING[] = "\"}";

uint64_t kvc_format_header(const kvc_format *format, char *to, uint64_t size) {
    text out = {to, size, 8}; /* behind the header's length, which is written last */
    add(&out, "%s%d%s%s%s%s%s", BEGINNING, KVC_FORMAT_VERSION, LIBRARY, format->library, FINGERPRINT,
        format->fingerprint, ENDING);
    kvc_format_visit(format, INT64_MAX, add_tensor, &out);
    add(&out, "}");
    while (out.length % KVC_FORMAT_ALIGNMENT) add(&out, " ");
    for (uint64_t i = 0, length = out.length - 8; i < 8 && i < size; i++) to[i] = (char)(length >> 8 * i);
    return out.length;
}

int kvc_is_fingerprint(const char *text) {
    size_t n = 0;
    while (n <= KVC_MOST_FINGERPRINT && text[n] >= ' ' && text[n] <= '~' && text[n] != '"' && text[n] != '\\') n++;
    return n <= KVC_MOST_FINGERPRINT && !text[n];
}

/* A place in a header that is being read. */
typedef struct place {
    const char *at, *end;
} place;

/* Moves behind what is expected there; returns whether it was there. */
static int pass(place *p, const char *expected) {
    const size_t n = strlen(expected);
    if ((size_t)(p->end - p->at) < n || memcmp(p->at, expected, n)) return 0;
    p->at += n;
    return 1;
}

/* Copies what stands before the next quote, at most size - 1 characters; returns 0 if that is longer. */
static int take_string(place *p, char *to, size_t size) {
    size_t n = 0;
    while (p->at < p->end && *p->at != '"' && n + 1 < size) to[n++] = *p->at++;
    to[n] = 0;
    return p->at < p->end && *p->at == '"' && kvc_is_fingerprint(to);
}

kvc_status kvc_format_read_strings(kvc_format *format, const char *header, uint64_t size) {
    char version[16];
    place p = {header, header + size};
    if (!pass(&p, BEGINNING) || !take_string(&p, version, sizeof version))
        return kvc_fail(KVC_ERR_FORMAT, "no saved state: the file does not begin like one");
    if (version[0] < '1' || version[0] - '0' > KVC_FORMAT_VERSION || version[1])
        return kvc_fail(KVC_ERR_FORMAT,
                        "of a newer format: version %s; this library, %d.%d.%d, reads versions up to %d", version,
                        KVC_VERSION_MAJOR, KVC_VERSION_MINOR, KVC_VERSION_PATCH, KVC_FORMAT_VERSION);
    if (pass(&p, LIBRARY) && take_string(&p, format->library, sizeof format->library) && pass(&p, FINGERPRINT) &&
        take_string(&p, format->fingerprint, sizeof format->fingerprint) && pass(&p, ENDING))
        return KVC_OK;
    return kvc_fail(KVC_ERR_FORMAT, "altered: the header's metadata is not in order");
}
