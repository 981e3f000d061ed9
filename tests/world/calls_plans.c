/* calls_plans.c: plans, whose tasks are run a few at a time, with other calls between.  A plan serves two layers where
 * it can.  While its client runs tasks, other clients help: some tasks are skipped, others run twice.  Whatever they
 * do, an output is not written or right.  Once all tasks of a layer were run in turn, the whole output is written. */
#include "calls.h"
#include "questions.h"

enum { PIECES = 2, MOST_TRIES = 20 };

static struct plan { /* of a client's batch */
    kvc_plan *plan;  /* NULL: there is none */
    int num_pieces, may_help, num_helpers;
    question pieces[PIECES]; /* of one layer each */
} plans[CLIENTS];

void forget_plan(int number) {
    struct plan *p = &plans[number];
    p->plan = NULL;
    p->may_help = p->num_helpers = 0; /* in the child of a fork() nobody helps any more */
}

/* Returns another layer that the plan of this layer serves, too; this layer if there is none. */
static int other_layer(int layer) {
    const kvc_layer *a = &w.o.layers[layer];
    for (int l = pick(w.o.num_layers); l >= 0; l--) {
        const kvc_layer *b = &w.o.layers[l];
        if (same_group(&w.o, l, layer) && a->num_kv_heads == b->num_kv_heads && a->k_dim == b->k_dim &&
            a->v_dim == b->v_dim)
            return l;
    }
    return layer;
}

int draw_plan(call *c) {
    const batch *b = &w.o.batches[me->number];
    if (!b->is_open || plans[me->number].plan || (b->restores && pick(20))) return 0;
    c->layer = pick(w.o.num_layers);
    return is_own(&w.o, source_of(&w.o, c->layer));
}

void run_plan_new(call *c) {
    const batch *b = &w.o.batches[c->client];
    struct plan *p = &plans[c->client];
    question *q = p->pieces;
    const int first = pick(3) ? 0 : pick(b->num);
    make_plan(q, b, c->layer, first, pick(3) ? b->num - first : 1 + pick(b->num - first));
    q->plan.select_rows = 0; /* whether a task selects after an error is open */
    c->more = b->restores ? 1u << KVC_ERR_INVALID : 1u << KVC_OK;
    c->status = kvc_plan_new(w.batches[c->client], &q->plan, &p->plan);
    if (c->status) {
        p->plan = NULL;
        return;
    }
    const int other = other_layer(c->layer);
    p->num_pieces = 1 + (other != c->layer);
    q[1] = q[0];
    q[1].layer = other;
    for (int i = 0; i < p->num_pieces; i++) make_question(&q[i]);
    c->result = kvc_plan_num_tasks(p->plan);
}

static kvc_status run_once(const struct plan *p, const question *q, int64_t task) {
    return w.o.layers[q->layer].v_dim ? kvc_plan_run(p->plan, q->layer, &q->args, task)
                                      : kvc_plan_choose(p->plan, q->layer, &q->choosing, task);
}

/* Runs a task, perhaps several times until no other client is in the way.  A task may have all rows that it needs
 * although another task lacks some. */
static kvc_status run_task(const struct plan *p, question *q, unsigned right, int64_t task) {
    kvc_status status = KVC_OK;
    if (right >> KVC_ERR_INVALID & 1) right |= 1u << KVC_OK;
    if (w.num_clients > 1 || q->cancel) right |= 1u << KVC_ERR_CANCELLED;
    for (int i = 0; i < MOST_TRIES; i++) {
        status = run_once(p, q, task);
        if (status != KVC_ERR_BUSY || w.num_clients == 1) break;
        if (drive.pause) drive.pause();
    }
    if (!(right >> status & 1) && !(status == KVC_ERR_BUSY && w.num_clients > 1))
        wrong("task %d of layer %d answers \"%s\"", (int)task, q->layer, kvc_strerror(status));
    return status;
}

/* Runs tasks of one layer or another: all or a few, some of them twice. */
static void run_some(struct plan *p) {
    const int64_t n = kvc_plan_num_tasks(p->plan);
    if (run_once(p, p->pieces, pick(2) ? n : -1) != KVC_ERR_INDEX) wrong("there is no such task, and it runs");
    for (int rounds = 1 + pick(6); rounds > 0 && n; rounds--) {
        question *q = &p->pieces[pick(p->num_pieces)];
        const unsigned right = right_statuses(q);
        const int first = pick((int)n), num = pick(3) ? 1 + pick(n < 3 ? (int)n : 3) : (int)n;
        for (int j = 0; j < num; j++) {
            if (!pick(8)) q->cancel = !q->cancel;
            run_task(p, q, right, (first + j) % n);
            if (!pick(4)) run_task(p, q, right, pick((int)n));
        }
    }
}

/* Runs all tasks of each layer. */
static void run_all_tasks(struct plan *p) {
    const int64_t n = kvc_plan_num_tasks(p->plan);
    for (int i = 0; i < p->num_pieces; i++) {
        question *q = &p->pieces[i];
        int is_whole = 1;
        const int first = pick((int)n);
        const unsigned right = right_statuses(q);
        q->cancel = 0;
        for (int j = 0; j < n; j++) is_whole &= run_task(p, q, right, (first + j) % n) == KVC_OK;
        check_answers(q, !is_whole);
    }
}

/* Chooses the client's own plan, or the plan of a client who is running it.  flag: the latter. */
int draw_tasks(call *c) {
    for (int i = 0; i < CLIENTS; i++)
        if (plans[i].may_help && i != me->number) c->to = i, c->flag = 1;
    return c->flag || plans[me->number].plan;
}

void run_tasks(call *c) {
    struct plan *p = &plans[c->flag ? c->to : c->client];
    lock_world();
    const int takes_part = c->flag ? p->may_help : p->plan != NULL;
    if (takes_part && c->flag) p->num_helpers++;
    if (takes_part && !c->flag) p->may_help = 1;
    unlock_world();
    if (!takes_part) return;
    run_some(p);
    for (int helpers = 1; helpers && !c->flag;) {
        lock_world();
        p->may_help = 0;
        helpers = p->num_helpers;
        unlock_world();
        if (helpers && drive.pause) drive.pause();
    }
    for (int i = 0; i < p->num_pieces && !c->flag; i++) check_answers(&p->pieces[i], 1);
    lock_world();
    if (c->flag) p->num_helpers--;
    unlock_world();
}

int draw_plan_free(call *c) {
    c->flag = pick(4);
    return plans[me->number].plan != NULL;
}

/* flag: runs all tasks first; leaves the plan to the end of the batch. */
void run_plan_free(call *c) {
    struct plan *p = &plans[c->client];
    if (p->plan && c->flag & 1) run_all_tasks(p);
    if (p->plan && c->flag & 2) kvc_plan_free(p->plan);
    p->plan = NULL;
}
