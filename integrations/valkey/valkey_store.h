/* valkey_store.h: a kvc_store on a server of Valkey or Redis, from 2.6 on, through hiredis. */
#ifndef VALKEY_STORE_H
#define VALKEY_STORE_H

#include <kvcache.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct valkey_options {
    const char *host; /* NULL: "127.0.0.1" */
    int32_t port;     /* 0: 6379 */
    int32_t database;
    const char *user;     /* NULL: the default one; others need a password */
    const char *password; /* NULL: none is sent */
    const char *prefix;   /* what keys begin with on the server.  NULL: "kvcache:" */
    int64_t ttl_ms;       /* milliseconds after which a value goes that was neither read nor written.  0: a day; -1: the
                             server evicts it */
    int64_t timeout_ms; /* milliseconds that a call waits to connect, and for the server to send or take anything.  0: a
                           second */
} valkey_options;

/* Sets *store to a new store on a server, to be freed with valkey_store_free.  It has the keys and values of Python's
 * kvcache.stores.ValkeyStore.  The first call connects.  A call that fails with KVC_ERR_STORE closes the connections,
 * and a later call connects again.  Any number of threads may use it: each call has a connection of its own, which is
 * kept for the next call.  A child of fork() makes a store of its own.  Fails with KVC_ERR_INVALID and KVC_ERR_NOMEM.
 */
kvc_status valkey_store_new(const valkey_options *options, kvc_store **store);

/* Frees a store that no call is using, and closes its connections.  Ignores NULL. */
void valkey_store_free(kvc_store *store);

#ifdef __cplusplus
}
#endif
#endif
