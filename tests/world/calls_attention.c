/* calls_attention.c: how attention is drawn and asked for. */
#include "questions.h"

/* Now and then in a batch that restores, or before rows are put. */
int draw_attend(call *c) {
    const batch *b = &w.o.batches[me->number];
    if (!b->is_open || (b->restores && pick(20))) return 0;
    if (pick(2) && draw_put(c)) return c->flag = may_put(&w.o, b, c) == KVC_OK && w.o.layers[c->layer].v_dim;
    c->begin = c->num = 0;
    c->layer = pick(w.o.num_layers);
    const kvc_layer *layer = &w.o.layers[c->layer];
    int all = 1;
    for (int t = 0; t < b->num; t++) all &= !is_own(&w.o, c->layer) || b->is_put[c->layer][t];
    return layer->v_dim && layer->policy.kind != KVC_NONE && (all || !pick(8));
}

/* Returns bits of the statuses that are right.  puts: what the rows that the call puts make right. */
static unsigned statuses_of(const question *q, kvc_status puts) {
    for (int t = 0; t < q->of->num; t++)
        if (!is_known(q->of, t)) return ~0u;
    const unsigned right = q->of->restores ? 1u << KVC_ERR_INVALID : right_statuses(q);
    const unsigned cancelled = q->cancel ? 1u << KVC_ERR_CANCELLED : 0;
    return puts ? 1u << puts : right | cancelled;
}

void run_attend(call *c) {
    static _Thread_local question q;
    packed k, v;
    kvc_put_args put;
    batch b = w.o.batches[c->client];
    const kvc_status puts = c->flag ? may_put(&w.o, &b, c) : KVC_OK;
    if (c->flag) make_put(c, &put, &k, &v);
    if (c->flag && !puts) memset(&b.is_put[c->layer][c->begin], PUT, (size_t)c->num);
    const int first = pick(3) ? 0 : pick(b.num), num = pick(3) ? b.num - first : 1 + pick(b.num - first);
    make_plan(&q, &b, c->layer, first, num);
    make_question(&q);
    if (c->flag) q.args.put = &put;
    if (pick(2)) q.plan.max_chosen = 0; /* as the choice says */
    if (pick(2)) q.plan.chosen_width = q.chosen.width;
    c->more = statuses_of(&q, puts);
    c->status = kvc_attend(w.batches[c->client], &q.plan, &q.args);
    if (!c->status) check_answers(&q, 0);
}
