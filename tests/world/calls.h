/* calls.h: the functions that draw and run calls, for the table in calls.c. */
#ifndef WORLD_CALLS_H
#define WORLD_CALLS_H

#include "world.h"

#define DRAWS(X)                                                                                                  \
    X(begin)                                                                                                      \
    X(put)                                                                                                        \
    X(write) X(put_cross) X(commit) X(abort) X(batch_spans) X(dense_rows) X(copy) X(share) X(remove) X(truncate)  \
        X(shift) X(divide) X(keep_positions) X(inject) X(mark_inexact) X(sequence) X(anything) X(reserve) X(view) \
            X(hold_free) X(extract) X(save) X(restore) X(load) X(fork) X(text) X(acquire) X(state) X(release)     \
                X(checkpoint) X(pin) X(unpin) X(evict) X(prefix_call) X(fetch) X(prefix_new) X(prefix_free) X(wait)
#define RUNS(X)                                                                                                       \
    X(begin)                                                                                                          \
    X(put)                                                                                                            \
    X(write) X(put_cross) X(commit) X(abort) X(batch_spans) X(dense_rows) X(copy) X(share) X(remove) X(truncate)      \
        X(shift) X(divide) X(keep_positions) X(inject) X(mark_inexact) X(clear_sequence) X(keep) X(clear) X(compact)  \
            X(settle) X(validate) X(reserve) X(room) X(view) X(hold_free) X(extract) X(save) X(restore) X(load)       \
                X(clone) X(fork) X(lookup) X(acquire) X(state) X(release) X(checkpoint) X(pin) X(unpin) X(evict)      \
                    X(prefix_clear) X(fetch) X(store_new) X(take_new) X(forget) X(names) X(prefix_new) X(prefix_free) \
                        X(wait)

#define DECLARE_DRAW(name) int draw_##name(call *c);
#define DECLARE_RUN(name) void run_##name(call *c);
DRAWS(DECLARE_DRAW)
RUNS(DECLARE_RUN)

kvc_status right_store_new(oracle *o, const call *c);
kvc_status right_prefix_free(oracle *o, const call *c);
kvc_status right_always(oracle *o, const call *c);
kvc_status right_wait(oracle *o, const call *c);

#endif
