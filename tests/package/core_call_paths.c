/* Writes to stdout the functions that one decode token of one layer enters and leaves: "name of the call", then
 * "+ address" and "-" lines.  The core is compiled with -finstrument-functions, this file without. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvcache.h"

enum { NUM_HEADS = 4, HEAD_DIM = 64, NUM_ROWS = 70, MOST_EVENTS = 1 << 21 };

static void *entered[MOST_EVENTS]; /* NULL: the function is left */
static int num_events;
static _Thread_local int is_recording; /* of the thread that makes the calls: workers wait for as long as they please */

static void note(void *function) {
    if (!is_recording) return;
    if (num_events == MOST_EVENTS) abort();
    entered[num_events++] = function;
}

void __cyg_profile_func_enter(void *function, void *caller);
void __cyg_profile_func_exit(void *function, void *caller);

void __cyg_profile_func_enter(void *function, void *caller) {
    (void)caller;
    note(function);
}

void __cyg_profile_func_exit(void *function, void *caller) {
    (void)function, (void)caller;
    note(NULL);
}

static kvc_status report(const char *name, kvc_status status) {
    is_recording = 0;
    puts(name);
    for (int i = 0; i < num_events; i++)
        if (entered[i])
            printf("+ %" PRIxPTR "\n", (uintptr_t)entered[i]);
        else
            puts("-");
    num_events = 0;
    return status;
}

static uint16_t q[NUM_ROWS][NUM_HEADS][HEAD_DIM], k[NUM_ROWS][NUM_HEADS][HEAD_DIM], v[NUM_ROWS][NUM_HEADS][HEAD_DIM],
    out[NUM_ROWS][NUM_HEADS][HEAD_DIM];

/* Begins, attends and commits `num_tokens` tokens, and records these calls if `records`. */
static kvc_status pass(kvc_cache *cache, int32_t num_tokens, int records) {
    const kvc_put_args put = {.struct_size = sizeof put,
                              .k = k,
                              .v = v,
                              .k_type = KVC_F16,
                              .v_type = KVC_F16,
                              .k_token_stride = sizeof k[0],
                              .v_token_stride = sizeof v[0],
                              .k_head_stride = sizeof k[0][0],
                              .v_head_stride = sizeof v[0][0]};
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = NUM_HEADS, .num_threads = 1};
    const kvc_attend_args attend = {.struct_size = sizeof attend,
                                    .put = &put,
                                    .q = q,
                                    .out = out,
                                    .q_type = KVC_F16,
                                    .q_token_stride = sizeof q[0],
                                    .out_token_stride = sizeof out[0],
                                    .q_head_stride = sizeof q[0][0],
                                    .out_head_stride = sizeof out[0][0]};
    kvc_batch *batch;
    is_recording = records;
    kvc_status status = kvc_begin(cache, num_tokens, NULL, NULL, NULL, &batch);
    if (records) report("begin", status);
    if (status != KVC_OK) return status;
    is_recording = records;
    status = kvc_attend(batch, &plan, &attend);
    if (records) report("attend", status);
    if (status != KVC_OK) return status;
    is_recording = records;
    status = kvc_commit(batch);
    return records ? report("commit", status) : status;
}

int main(void) {
    const kvc_layer layer = {
        .num_kv_heads = NUM_HEADS, .k_dim = HEAD_DIM, .v_dim = HEAD_DIM, .k_type = KVC_F16, .v_type = KVC_F16};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &layer,
                               .layer_size = sizeof layer,
                               .num_layers = 1,
                               .max_seq_len = 4096};
    kvc_cache *cache;
    kvc_status status = kvc_cache_new(&config, &cache);
    if (status == KVC_OK) status = pass(cache, NUM_ROWS - 2, 0);
    if (status == KVC_OK) status = pass(cache, 1, 0);
    if (status == KVC_OK) status = pass(cache, 1, 1);
    if (status == KVC_OK) {
        kvc_cache_free(cache);
        return 0;
    }
    fprintf(stderr, "%s\n", kvc_last_error());
    return 1;
}
