// The batches of a decode: one batch of the cache for all its ubatches, which are computed one after the other.
#include "llama-kvcache.h"

#include "llama-kvcache-select.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

static bool has_coupled_tokens(const int32_t *n_seq_id, size_t n_tokens) {
    return std::any_of(n_seq_id, n_seq_id + n_tokens, [](int32_t n) { return n > 1; });
}

// Coupled tokens are shared once they are stored, for others to see from the next ubatch on.  So the sequences of one
// token are all those of another of its ubatch, or none.
static std::vector<llama_ubatch> split(llama_batch_allocr &balloc, uint32_t n_ubatch, bool is_coupled) {
    std::vector<llama_ubatch> res;

    balloc.split_reset();

    while (true) {
        auto ubatch = is_coupled ? balloc.split_equal(n_ubatch, false, 0) : balloc.split_simple(n_ubatch);

        if (ubatch.n_tokens == 0) {
            return res;
        }

        res.push_back(std::move(ubatch));
    }
}

// returns whether no token comes before one of a smaller position of the same sequence
static bool is_in_order(const std::vector<llama_ubatch> &ubatches) {
    std::vector<llama_pos> last(LLAMA_MAX_SEQ, -1);

    for (const auto &ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            for (int32_t s = 0; s < ubatch.n_seq_id[i]; ++s) {
                if (ubatch.pos[i] < last[ubatch.seq_id[i][s]]) {
                    return false;
                }
                last[ubatch.seq_id[i][s]] = ubatch.pos[i];
            }
        }
    }

    return true;
}

void llama_kvcache::note_failure(const char *func, const std::string &reason) {
    if (!reason.empty()) {
        LLAMA_LOG_ERROR("%s: %s\n", func, reason.c_str());
    }
    last_failure = reason.empty() ? "" : "libkvcache: " + reason;
}

llama_memory_context_ptr llama_kvcache::init_batch(llama_batch_allocr &balloc, uint32_t n_ubatch, bool /*embd_all*/) {
    note_failure(__func__, "");

    const auto &batch = balloc.get_batch();
    const bool is_coupled = has_coupled_tokens(batch.n_seq_id, batch.n_tokens);

    auto ubatches = split(balloc, n_ubatch, is_coupled);

    if (is_coupled && !is_in_order(ubatches)) {
        ubatches = split(balloc, 1, false);
    }

    if (balloc.get_n_used() < balloc.get_n_tokens()) {
        LLAMA_LOG_ERROR("%s: failed to split the batch\n", __func__);
        return std::make_unique<llama_kvcache_context>(this, LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }

    return init_ubatches(std::move(ubatches));
}

bool llama_kvcache::is_one_by_one(const std::vector<llama_ubatch> &ubatches) const {
    return (!cparams.causal_attn && ubatches.size() > 1) ||
           std::any_of(ubatches.begin(), ubatches.end(),
                       [](const llama_ubatch &ubatch) { return has_coupled_tokens(ubatch.n_seq_id, ubatch.n_tokens); });
}

// returns how many tokens of a decode each sequence has
static std::vector<int32_t> count_tokens(const std::vector<llama_ubatch> &ubatches) {
    std::vector<int32_t> res(LLAMA_MAX_SEQ);

    for (const auto &ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            for (int32_t s = 0; s < ubatch.n_seq_id[i]; ++s) {
                ++res[ubatch.seq_id[i][s]];
            }
        }
    }

    return res;
}

static llama_pos last_position(const std::vector<llama_ubatch> &ubatches) {
    llama_pos res = -1;

    for (const auto &ubatch : ubatches) {
        res = std::max(res, *std::max_element(ubatch.pos, ubatch.pos + ubatch.n_tokens));
    }

    return res;
}

std::string llama_kvcache::copy_refusal(const std::vector<llama_ubatch> &ubatches) {
    for (const auto &ubatch : ubatches) {
        for (uint32_t i = 0; !lacking.empty() && i < ubatch.n_tokens; ++i) {
            for (int32_t s = 0; s < ubatch.n_seq_id[i]; ++s) {
                const auto found = lacking.find(ubatch.seq_id[i][s]);

                if (found == lacking.end()) {
                    continue;
                }
                if (ubatch.pos[i] > kvc_next_position(cache, id_of(found->first))) {
                    return format("tokens were not copied to sequence %d: %s", found->first, found->second.c_str());
                }
                lacking.erase(found);
            }
        }
    }

    return "";
}

llama_memory_context_ptr llama_kvcache::init_ubatches(std::vector<llama_ubatch> ubatches) {
    close();

    std::string reason = copy_refusal(ubatches);

    if (reason.empty()) {
        reason = stride_refusal(ubatches);
    }
    if (!reason.empty()) {
        note_failure(__func__, reason);
        return std::make_unique<llama_kvcache_context>(this, LLAMA_MEMORY_STATUS_FAILED_COMPUTE);
    }

    // the cache counts rows, and there may be no layer with a row for each token
    if (const llama_pos last = last_position(ubatches); has_strides() && last >= (llama_pos)cparams.n_ctx_seq) {
        LLAMA_LOG_WARN("%s: position %d does not fit: a sequence has at most %u tokens\n", __func__, last,
                       cparams.n_ctx_seq);
        return std::make_unique<llama_kvcache_context>(this, LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }

    check_states(ubatches);
    take_states(ubatches);
    n_decoded = count_tokens(ubatches);

    const bool is_one_by_one = this->is_one_by_one(ubatches);
    kvc_status status = begin(ubatches.data(), ubatches.size());

    if (!status && !is_one_by_one) {
        status = plan(ubatches[0]); // as long as nothing has changed, so that fewer tokens can be tried
    }
    if (status == KVC_ERR_FULL) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, kvc_last_error());
    } else if (status) {
        note_failure(__func__, kvc_last_error());
    }
    if (status || is_one_by_one) {
        close(); // all fit, if they are begun one by one
    }
    if (status) {
        const bool has_no_room = status == KVC_ERR_FULL || status == KVC_ERR_NOMEM;

        return std::make_unique<llama_kvcache_context>(this, has_no_room ? LLAMA_MEMORY_STATUS_FAILED_PREPARE
                                                                         : LLAMA_MEMORY_STATUS_FAILED_COMPUTE);
    }

    return std::make_unique<llama_kvcache_context>(this, std::move(ubatches), is_one_by_one);
}

// Returns each token's predecessor in its sequence, where tokens of one stand at the same position: those of an image,
// with M-RoPE, of which each is to see the ones before it.  Elsewhere positions say what a token sees, and nothing is
// returned.
static std::vector<int32_t> parents_of(const std::vector<int32_t> &positions, const std::vector<llama_seq_id> &seqs) {
    std::vector<int32_t> last(LLAMA_MAX_SEQ, -1);
    std::vector<int32_t> res;

    bool has_equal = false;

    for (int32_t i = 0; i < (int32_t)positions.size(); ++i) {
        const int32_t parent = last[seqs[i]];

        has_equal = has_equal || (parent >= 0 && positions[parent] == positions[i]);
        res.push_back(parent);
        last[seqs[i]] = i;
    }

    return has_equal ? res : std::vector<int32_t>();
}

kvc_status llama_kvcache::begin(const llama_ubatch *ubatches, size_t n_ubatches) {
    close();

    std::vector<int32_t> positions;
    std::vector<llama_seq_id> seqs;
    std::vector<int64_t> seq_ids;

    for (size_t u = 0; u < n_ubatches; ++u) {
        for (uint32_t i = 0; i < ubatches[u].n_tokens; ++i) {
            positions.push_back(ubatches[u].pos[i]);
            seqs.push_back(ubatches[u].seq_id[i][0]);
            seq_ids.push_back(id_of(seqs.back()));
        }
    }

    const bool is_2d = model.hparams.n_pos_per_embd() > 1 && cparams.causal_attn;
    const auto parents = is_2d ? parents_of(positions, seqs) : std::vector<int32_t>();

    return kvc_begin(cache, (int32_t)positions.size(), positions.data(), seq_ids.data(),
                     parents.empty() ? nullptr : parents.data(), &batch);
}

kvc_status llama_kvcache::plan(const llama_ubatch &ubatch) {
    free_plans();

    n_cur = ubatch.n_tokens;
    cur_ids.clear();
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        cur_ids.push_back(id_of(ubatch.seq_id[i][0]));
    }

    // Rows of text then do not follow from the tokens before them alone.  Those of an image do: it is seen as a whole.
    for (uint32_t i = 0; !cparams.causal_attn && ubatch.token && i < ubatch.n_tokens; ++i) {
        kvc_mark_inexact(cache, id_of(ubatch.seq_id[i][0]), ubatch.pos[i]);
    }

    kvc_status status = has_inputs() ? find_inputs(ubatch) : KVC_OK;

    for (size_t shape = 0; shape < plans.size() && !status; ++shape) {
        status = plan_shape(ubatch, (int32_t)shape);
    }

    for (auto &op : ops) {
        op->next_task.store(0, std::memory_order_relaxed);
    }

    return status;
}

bool llama_kvcache::selects(const llama_ubatch &ubatch, uint32_t i) const {
    const llama_seq_id *seqs = ubatch.seq_id[i];

    return std::all_of(seqs, seqs + ubatch.n_seq_id[i], [&](llama_seq_id s) { return n_decoded[s] == 1; }) &&
           kvc_seq_len(cache, id_of(seqs[0]), -1) + 1 >= llama_kvcache_select_from(layers.select_rows);
}

bool llama_kvcache::chooses(const llama_ubatch &ubatch, uint32_t i) const {
    if (layers.choice.pool > 1) {
        return !layers.choice.has_tail || (ubatch.pos[i] + 1) / layers.choice.pool > layers.choice.width;
    }

    const llama_seq_id s = ubatch.seq_id[i][0];

    // rows, which several positions may share, or blocks of positions, which later tokens may be seen in
    const int64_t n_seen = layers.choice.block == 1 ? kvc_seq_len(cache, id_of(s), -1) + n_decoded[s]
                           : cparams.causal_attn    ? ubatch.pos[i] / layers.choice.block + 1
                                                    : INT64_MAX;

    return n_seen > layers.choice.width;
}

static int32_t most_chosen(const llama_kvcache_choice &choice) {
    return choice.width * choice.block + (choice.has_tail ? choice.block - 1 : 0);
}

kvc_status llama_kvcache::plan_shape(const llama_ubatch &ubatch, int32_t shape) {
    const int32_t layer = layers.shapes[shape];
    const auto &l = layers.model[layer];
    const bool can_select = layers.cache[layer].sketch_bits > 0 && is_causal(l);
    const std::vector<uint8_t> non_causal(n_cur, 1);

    kvc_plan_args args = {};

    args.struct_size = sizeof(args);
    args.layer = layer;
    args.num_heads = l.n_head;
    args.num_threads = n_cur > 1 ? cparams.n_threads_batch : cparams.n_threads;
    args.non_causal = is_causal(l) ? nullptr : non_causal.data();

    args.precision = l.is_index ? KVC_PRECISION_STORED : layers.precision;
    args.num_choices = l.is_index ? layers.choice.num_choices : 0;

    const auto reads_part = [&](int32_t i) {
        return l.is_sparse ? chooses(ubatch, i) : can_select && selects(ubatch, i);
    };

    for (int32_t first = 0, end = 0; first < n_cur; first = end) {
        const bool is_part = reads_part(first);

        for (end = first + 1; end < n_cur && reads_part(end) == is_part;) {
            ++end;
        }
        if (l.is_index && !is_part) {
            continue; // all rows are chosen
        }

        args.first = n_done + first;
        args.num_tokens = end - first;
        args.max_chosen = is_part && l.is_sparse && !l.is_index ? most_chosen(layers.choice) : 0;
        args.select_rows = is_part && can_select ? layers.select_rows : 0;
        plans[shape].push_back({first, is_part, nullptr});

        if (const kvc_status status = kvc_plan_new(batch, &args, &plans[shape].back().plan)) {
            return status;
        }
    }

    return KVC_OK;
}

bool llama_kvcache::is_causal(const llama_kvcache_layer &layer) const {
    const bool in_windows_alone = model.hparams.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_ONLY ||
                                  model.hparams.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_FULL;

    return cparams.causal_attn || (in_windows_alone && !layer.is_swa);
}

void llama_kvcache::free_plans() {
    for (auto &of_shape : plans) {
        for (const auto &part : of_shape) {
            kvc_plan_free(part.plan);
        }
        of_shape.clear();
    }
}

void llama_kvcache::finish() {
    free_plans();

    n_done += n_cur;
    n_cur = 0;
}

void llama_kvcache::share(const llama_ubatch &ubatch) {
    for (uint32_t first = 0; first < ubatch.n_tokens; first += ubatch.n_seq_tokens) {
        const uint32_t last = first + ubatch.n_seq_tokens - 1;

        for (int32_t s = 1; s < ubatch.n_seq_id[first]; ++s) {
            seq_cp(ubatch.seq_id[first][0], ubatch.seq_id[first][s], ubatch.pos[first], ubatch.pos[last] + 1);
        }
    }
}

void llama_kvcache::close() {
    if (!batch) {
        return;
    }

    free_plans();

    std::vector<int32_t> kept(n_done);
    for (int32_t i = 0; i < n_done; ++i) {
        kept[i] = i;
    }

    if (n_done == 0) {
        kvc_abort(batch);
    } else if (kvc_commit_kept(batch, kept.data(), n_done)) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, kvc_last_error());
        kvc_abort(batch);
    }

    batch = nullptr;
    n_done = 0;
    n_cur = 0;
}

llama_kvcache_context::llama_kvcache_context(llama_kvcache *mem, llama_memory_status status)
    : mem(mem), status(status) {}

llama_kvcache_context::llama_kvcache_context(llama_kvcache *mem, std::vector<llama_ubatch> ubatches, bool is_one_by_one)
    : mem(mem), status(LLAMA_MEMORY_STATUS_SUCCESS), ubatches(std::move(ubatches)), is_one_by_one(is_one_by_one) {}

llama_kvcache_context::~llama_kvcache_context() {
    if (!ubatches.empty()) {
        mem->close();
    }
}

bool llama_kvcache_context::apply() {
    if (ubatches.empty()) {
        return true;
    }

    kvc_status status = is_one_by_one ? mem->begin(&ubatches[i_cur], 1) : KVC_OK;

    if (!status && (is_one_by_one || i_cur > 0)) { // otherwise it is planned
        status = mem->plan(ubatches[i_cur]);
    }
    if (status) {
        mem->note_failure(__func__, kvc_last_error());
    }

    return status == KVC_OK;
}

bool llama_kvcache_context::next() {
    mem->finish();

    const auto &ubatch = ubatches[i_cur++];

    if (is_one_by_one) {
        mem->close();
        mem->share(ubatch);
    }

    if (i_cur < ubatches.size()) {
        return true;
    }

    mem->close();

    return false;
}

const llama_ubatch &llama_kvcache_context::get_ubatch() const { return ubatches[i_cur]; }

llama_memory_status llama_kvcache_context::get_status() const { return status; }
