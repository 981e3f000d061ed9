/* valkey_store.c: see valkey_store.h. */
#define _POSIX_C_SOURCE 200809L
#include "valkey_store.h"

#include <errno.h>
#include <hiredis/hiredis.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

enum { KEY = 2 * KVC_NAME_BYTES, NUMBER = 24, MOST_TEXT = 256 };

typedef struct connection {
    struct connection *next;
    redisContext *context;
} connection;

typedef struct server {
    kvc_store store;
    char host[MOST_TEXT], user[MOST_TEXT], password[MOST_TEXT], prefix[MOST_TEXT];
    int32_t port, database;
    int64_t ttl_ms, timeout_ms;
    pthread_mutex_t mutex;
    connection *idle; /* list, guarded by the mutex */
} server;

/* ---- connections ------------------------------------------------------------------------------------------------- */

/* Returns KVC_ERR_STORE, with what the server or the client says. */
static kvc_status fail_for(const server *s, const char *reason) {
    kvc_set_last_error("the server %s:%d: %s", s->host, (int)s->port, reason);
    return KVC_ERR_STORE;
}

/* A command: its words, which may hold any bytes. */
typedef struct command {
    const char *words[5];
    size_t sizes[5];
    int num;
} command;

static void add_word(command *c, const void *word, size_t size) {
    c->words[c->num] = word;
    c->sizes[c->num++] = size;
}

static command command_of(const char *verb, const char *key, size_t key_size) {
    command c = {.num = 0};
    add_word(&c, verb, strlen(verb));
    add_word(&c, key, key_size);
    return c;
}

static void append(const connection *c, const command *what) {
    int num = what->num;
    redisAppendCommandArgv(c->context, num, (const char **)(uintptr_t)what->words, what->sizes);
}

/* Waits for the next answer; *reply is to be freed.  Answers that are errors are returned as failures. */
static kvc_status answer(const server *s, const connection *c, redisReply **reply) {
    void *got = NULL;
    *reply = NULL;
    if (redisGetReply(c->context, &got) != REDIS_OK) {
        const int is_late = c->context->err == REDIS_ERR_IO && errno == EAGAIN; /* "Resource temporarily unavailable" */
        return fail_for(s, is_late ? "it took longer than timeout_ms" : c->context->errstr);
    }
    *reply = got;
    return (*reply)->type == REDIS_REPLY_ERROR ? fail_for(s, (*reply)->str) : KVC_OK;
}

/* Sends a command, and waits for an answer whose contents are no matter. */
static kvc_status tell(const server *s, const connection *c, const command *what) {
    redisReply *reply;
    append(c, what);
    const kvc_status status = answer(s, c, &reply);
    if (reply) freeReplyObject(reply);
    return status;
}

static void close_connection(connection *c) {
    if (c->context) redisFree(c->context);
    free(c);
}

/* Logs in, and chooses the database. */
static kvc_status greet(const server *s, const connection *c) {
    kvc_status status = KVC_OK;
    char number[NUMBER];
    if (*s->password) {
        command login = {.num = 0};
        add_word(&login, "AUTH", 4);
        if (*s->user) add_word(&login, s->user, strlen(s->user));
        add_word(&login, s->password, strlen(s->password));
        status = tell(s, c, &login);
    }
    if (status != KVC_OK || !s->database) return status;
    const command choice = command_of("SELECT", number, (size_t)snprintf(number, NUMBER, "%d", (int)s->database));
    return tell(s, c, &choice);
}

static kvc_status open_connection(const server *s, connection **c) {
    const struct timeval timeout = {(time_t)(s->timeout_ms / 1000), (suseconds_t)(s->timeout_ms % 1000 * 1000)};
    *c = calloc(1, sizeof **c);
    if (*c) (*c)->context = redisConnectWithTimeout(s->host, s->port, timeout);
    if (!*c || !(*c)->context) {
        free(*c);
        kvc_set_last_error("out of memory for a connection");
        return KVC_ERR_NOMEM;
    }
    kvc_status status = (*c)->context->err ? fail_for(s, (*c)->context->errstr) : KVC_OK;
    if (status == KVC_OK) {
        redisSetTimeout((*c)->context, timeout);
        status = greet(s, *c);
    }
    if (status != KVC_OK) close_connection(*c);
    return status;
}

static kvc_status take_connection(server *s, connection **c) {
    pthread_mutex_lock(&s->mutex);
    *c = s->idle;
    if (*c) s->idle = (*c)->next;
    pthread_mutex_unlock(&s->mutex);
    return *c ? KVC_OK : open_connection(s, c);
}

static void close_all(connection *c) {
    for (connection *next; c; c = next) {
        next = c->next;
        close_connection(c);
    }
}

/* Keeps a connection for the next call.  If this call has failed, answers may be left, and the server may be gone: idle
 * connections are closed, too. */
static void give_connection(server *s, connection *c, kvc_status status) {
    pthread_mutex_lock(&s->mutex);
    c->next = s->idle;
    s->idle = status == KVC_OK ? c : NULL;
    pthread_mutex_unlock(&s->mutex);
    if (status != KVC_OK) close_all(c);
}

/* ---- commands ---------------------------------------------------------------------------------------------------- */

/* Writes the key of a name; returns its bytes. */
static size_t key_of(const server *s, const uint8_t *name, char *key) {
    const size_t size = strlen(s->prefix);
    memcpy(key, s->prefix, size);
    for (int i = 0; i < KEY; i++) key[size + (size_t)i] = "0123456789abcdef"[name[i / 2] >> (i % 2 ? 0 : 4) & 15];
    return size + KEY;
}

/* Reads no more than a byte beyond max_bytes, whatever the server has; a value that was read lives on. */
static kvc_status read_on(const server *s, const connection *c, const uint8_t *name, void *value, int64_t max_bytes,
                          int64_t *size) {
    char key[MOST_TEXT + KEY], most[NUMBER], ttl[NUMBER];
    const size_t key_size = key_of(s, name, key);
    redisReply *reply;
    command range = command_of("GETRANGE", key, key_size), expire = command_of("PEXPIRE", key, key_size);
    add_word(&range, "0", 1);
    add_word(&range, most, (size_t)snprintf(most, NUMBER, "%lld", (long long)max_bytes));
    append(c, &range);
    if (s->ttl_ms > 0) {
        add_word(&expire, ttl, (size_t)snprintf(ttl, NUMBER, "%lld", (long long)s->ttl_ms));
        append(c, &expire);
    }
    kvc_status status = answer(s, c, &reply);
    if (status == KVC_OK && reply->type != REDIS_REPLY_STRING) status = fail_for(s, "its answer is no string");
    if (status == KVC_OK) {
        *size = (int64_t)reply->len;
        if (*size <= max_bytes) memcpy(value, reply->str, reply->len);
    }
    if (reply) freeReplyObject(reply);
    if (status != KVC_OK || s->ttl_ms <= 0) return status;
    status = answer(s, c, &reply);
    if (reply) freeReplyObject(reply);
    return status;
}

static kvc_status write_on(const server *s, const connection *c, const uint8_t *name, const void *value, int64_t size) {
    char key[MOST_TEXT + KEY], ttl[NUMBER];
    command set = command_of("SET", key, key_of(s, name, key));
    add_word(&set, value, (size_t)size);
    if (s->ttl_ms > 0) {
        add_word(&set, "PX", 2);
        add_word(&set, ttl, (size_t)snprintf(ttl, NUMBER, "%lld", (long long)s->ttl_ms));
    }
    return tell(s, c, &set);
}

static kvc_status remove_on(const server *s, const connection *c, const uint8_t *name) {
    char key[MOST_TEXT + KEY];
    redisReply *reply;
    command del = command_of("DEL", key, key_of(s, name, key));
    append(c, &del);
    const kvc_status status = answer(s, c, &reply);
    if (reply) freeReplyObject(reply);
    return status;
}

/* ---- the store --------------------------------------------------------------------------------------------------- */

/* Keeps SIGPIPE from this thread, which a server that has gone would send; hold.was: it waits or is blocked already. */
typedef struct hold {
    sigset_t before;
    int was;
} hold;

static void hold_signal(hold *h) {
    sigset_t set;
    sigpending(&set);
    h->was = sigismember(&set, SIGPIPE);
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &set, &h->before);
}

static void release_signal(const hold *h) {
    sigset_t set;
    int number;
    sigpending(&set);
    if (!h->was && sigismember(&set, SIGPIPE)) {
        sigemptyset(&set);
        sigaddset(&set, SIGPIPE);
        sigwait(&set, &number);
    }
    pthread_sigmask(SIG_SETMASK, &h->before, NULL);
}

/* A call of the store: its connection, and the signal that is held back meanwhile. */
typedef struct call {
    server *server;
    connection *connection;
    hold held;
} call;

static kvc_status begin_call(call *c, server *s) {
    c->server = s;
    hold_signal(&c->held);
    const kvc_status status = take_connection(s, &c->connection);
    if (status != KVC_OK) release_signal(&c->held);
    return status;
}

static kvc_status end_call(const call *c, kvc_status status) {
    give_connection(c->server, c->connection, status);
    release_signal(&c->held);
    return status;
}

static kvc_status read_value(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size) {
    call c;
    *size = 0;
    const kvc_status status = begin_call(&c, user);
    return status ? status : end_call(&c, read_on(c.server, c.connection, name, value, max_bytes, size));
}

static kvc_status write_value(void *user, const uint8_t *name, const void *value, int64_t size) {
    call c;
    const kvc_status status = begin_call(&c, user);
    return status ? status : end_call(&c, write_on(c.server, c.connection, name, value, size));
}

static kvc_status remove_value(void *user, const uint8_t *name) {
    call c;
    const kvc_status status = begin_call(&c, user);
    return status ? status : end_call(&c, remove_on(c.server, c.connection, name));
}

/* Copies a text; returns whether there is room for it. */
static int copy(char *to, const char *from, const char *otherwise) {
    if (!from) from = otherwise;
    if (strlen(from) >= MOST_TEXT) return 0;
    memcpy(to, from, strlen(from) + 1);
    return 1;
}

kvc_status valkey_store_new(const valkey_options *options, kvc_store **store) {
    server *s = calloc(1, sizeof *s);
    if (!s || pthread_mutex_init(&s->mutex, NULL)) {
        free(s);
        kvc_set_last_error("out of memory for a store");
        return KVC_ERR_NOMEM;
    }
    s->store = (kvc_store){sizeof s->store, s, read_value, write_value, remove_value};
    s->port = options->port ? options->port : 6379;
    s->database = options->database;
    s->ttl_ms = options->ttl_ms ? options->ttl_ms : 86400000;
    s->timeout_ms = options->timeout_ms ? options->timeout_ms : 1000;
    const int fits = copy(s->host, options->host, "127.0.0.1") && copy(s->user, options->user, "") &&
                     copy(s->password, options->password, "") && copy(s->prefix, options->prefix, "kvcache:");
    const int has_login = !*s->user || *s->password;
    if (fits && has_login && s->port > 0 && s->port < 65536 && s->database >= 0 && s->ttl_ms >= -1 &&
        s->timeout_ms > 0) {
        *store = &s->store;
        return KVC_OK;
    }
    valkey_store_free(&s->store);
    if (!has_login) {
        kvc_set_last_error("there is a user, but no password");
        return KVC_ERR_INVALID;
    }
    kvc_set_last_error("port is %d, database %d, ttl_ms %lld, timeout_ms %lld: one is out of range, or a text has more "
                       "than %d bytes",
                       (int)options->port, (int)options->database, (long long)options->ttl_ms,
                       (long long)options->timeout_ms, MOST_TEXT - 1);
    return KVC_ERR_INVALID;
}

void valkey_store_free(kvc_store *store) {
    if (!store) return;
    server *s = store->user;
    close_all(s->idle);
    pthread_mutex_destroy(&s->mutex);
    free(s);
}
